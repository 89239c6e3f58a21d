"""What is known of models and methods before anything is loaded: tables and arithmetic, without torch.

- Models: `config_fields` reads a config.json key by key, `family` and `families` say what each key means, `hf_config`
  makes a ModelConfig of it (`config`), and `counting` says what each layer is. `family_rules` and `gguf_graphs` are
  parts of a family's entry; `presets` and `published` are configs that need no file.
- Methods: `optimizers`, `objectives`, `attention`, and the usual learning `rates`.
- `limits`: numbers that the runtime obeys and a plan counts with. `columns`: what datasets call their columns.

A model goes one way: config.json -> `Fields` -> ModelConfig -> `counting.layers`, which everything else reads. Only
`hf_config.config_to_hf` goes back.

Each method's code is elsewhere: an optimizer's in train/optim/NAME.py, an objective's in `BUILDERS` of
train/objectives/build.py, an attention backend's in model/attention/attend.py, a family's GGUF tensors in
export/gguf_format.py.

`OPTIMIZERS`, `OBJECTIVES`, `FAMILIES`, `BACKENDS` and `PRESETS` are `table.OpenTable`s: entries are added, those of
installed packages too, until the schema of recipes is made of their names (`recipe/schema.py`) and closes the tables.
The places that a new entry of each touches: docs/contributing/growing-it.md.
"""
