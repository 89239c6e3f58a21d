"""As `family_rules`, of dense families that state dropouts, rotations and residual streams under keys of their own."""

from bloomery.facts.config import ModelConfig
from bloomery.facts.config_fields import Fields, HfKeys, ModelFacts, NotNative
from bloomery.facts.family_rules import first_window, layer_types, windows_by_type


def windows_but_each(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """A window in every layer but each n-th."""

    def slides(layer: int) -> bool:
        return (layer + 1) % fields.size("sliding_window_pattern", 2**12, default=4) != 0

    return windows_by_type(fields, layers, slides)


def rotation_in_windows(_fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Only layers with a window rotate."""
    windows = facts["sliding_window"] or (None,) * facts["num_layers"]
    return {"rotary_layers": tuple(window is not None for window in windows)}


def exaone4_rotation(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Every layer rotates in a model that states no window."""
    if fields.get("sliding_window") is None:
        return {}
    return rotation_in_windows(fields, facts)


def write_rotation_in_windows(config: ModelConfig) -> HfKeys:
    """A window that no layer has says that none rotates."""
    keys = layer_types(config)
    if config.rotary_layers and keys["sliding_window"] is None:
        keys["sliding_window"] = config.max_positions
    return keys


def cohere_facts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    return {"logit_scale": fields.number("logit_scale", low=1e-6)}


def write_cohere(config: ModelConfig) -> HfKeys:
    return {"logit_scale": config.logit_scale}


def named_dropouts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    """Where transformers' `resid_pdrop` and `embd_pdrop` have longer names."""
    return {
        "residual_dropout": fields.number("residual_dropout", high=0.999, default=0.0),
        "embedding_dropout": fields.number("embedding_dropout", high=0.999, default=0.0),
    }


def seed_oss_dropout(fields: Fields, facts: ModelFacts) -> ModelFacts:
    return named_dropouts(fields, facts) | {"embedding_dropout": 0.0}


def write_seed_oss(config: ModelConfig) -> HfKeys:
    return {"residual_dropout": config.residual_dropout}


def write_starcoder2(config: ModelConfig) -> HfKeys:
    return {
        "residual_dropout": config.residual_dropout,
        "embedding_dropout": config.embedding_dropout,
        "sliding_window": first_window(config),
    }


def hunyuan_rotation(fields: Fields, facts: ModelFacts) -> ModelFacts:
    """Its "dynamic" scaling with `alpha` depends on no length: it is another base."""
    rope_fields = fields.inside("rope_scaling") or fields.inside("rope_parameters")
    alpha = None if rope_fields is None else rope_fields.optional_number("alpha")
    scaling = facts["rope_scaling"]
    if alpha is None or scaling is None or scaling.kind != "dynamic":
        return {}
    width = facts["head_dim"]
    theta = facts["rope_theta"] * alpha ** (width / (width - 2))
    return {"rope_theta": theta, "rope_scaling": None}


def stablelm_facts(fields: Fields, _facts: ModelFacts) -> ModelFacts:
    if fields.number("hidden_dropout", high=0.999, default=0.0):
        raise NotNative(
            "hidden_dropout drops what the MLP makes alone, which is not supported",
            where=fields.where,
            fix="set it to 0",
        )
    is_parallel = fields.flag("use_parallel_residual")
    return {"norm_placement": "shared" if is_parallel else "before"}


def write_stablelm(config: ModelConfig) -> HfKeys:
    return {"use_parallel_residual": config.norm_placement == "shared"}
