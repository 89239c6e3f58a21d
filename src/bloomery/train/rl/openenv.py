"""Environments of OpenEnv in TRL's form: `reset`, one tool, `step`, and the sum of its rewards. Does not import torch.

OpenEnv's protocol, as openenv-core 0.3 and openenv 0.10 have it: `reset(seed, episode_id, ...)` and `step(action)`
return an observation with `done` and `reward`. An environment is a class of the user's, or runs in a server that is
asked over a WebSocket.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol, cast, final, get_type_hints
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from pydantic import BaseModel

from bloomery.train.rl.rewards_worker import Unusable, error_text
from bloomery.train.rl.tool_functions import Json, without_titles

TOOL = "step"
SERVER_SECONDS = 30.0  # for a server to accept a connection, and to tell its schema
MOST_BYTES = 16 * 2**20  # of a message of a server
SEEDS = 2**31  # environments hand them on to generators that take no larger ones
OVER = "the episode is over: the environment takes no further step"


class Session(Protocol):
    """An environment that runs: what it observes as JSON, with `reward` and `done` beside."""

    def reset(self, seed: int, row: Json) -> Json: ...

    def step(self, action: Json) -> Json: ...


@final
class OpenEnvironment:
    """An environment in TRL's form. The reward of an episode is the sum of those of its steps."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._total = 0.0
        self._is_over = False

    def reset(self, seed: int, **row: Any) -> str:
        """The first observation, which ends the user's turn."""
        columns = {name: value for name, value in row.items() if name != "prompt"}
        answer = self._session.reset(seed % SEEDS, columns)
        self._total = float(answer.get("reward") or 0.0)
        self._is_over = bool(answer.get("done"))
        text = text_of(answer["observation"])
        return f"\n\n{text}" if text else ""

    def step(self, **action: Any) -> str:
        if self._is_over:
            raise RuntimeError(OVER)
        answer = self._session.step(action)
        self._total += float(answer.get("reward") or 0.0)
        self._is_over = bool(answer.get("done"))
        text = text_of(answer["observation"])
        return f"{text}\n(the episode is over)" if self._is_over else text

    def get_reward(self) -> float:
        return self._total


def text_of(observation: Json) -> str:
    """An observation as a model reads it: its one text, or its fields as JSON."""
    fields = {
        name: value
        for name, value in observation.items()
        if name not in ("done", "reward", "metadata") and value is not None
    }
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def action_class(environment: type) -> type[BaseModel] | None:
    """What `step` of an environment of OpenEnv takes; None for a class of TRL's form."""
    step = getattr(environment, "step", None)
    if not callable(step) or hasattr(environment, "get_reward"):
        return None
    names = [name for name in inspect.signature(step).parameters if name != "self"]
    try:
        kind = get_type_hints(step).get(names[0]) if names else None
    except (NameError, TypeError):
        return None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def step_schema(action: Json, description: str) -> Json:
    """What chat templates tell of the tool. `action`: the JSON schema of an action."""
    parameters = cast(Json, without_titles(action))
    properties = dict(parameters.get("properties", {}))
    properties.pop("metadata", None)
    parameters = {"type": "object", **parameters, "properties": properties}
    parameters.pop("additionalProperties", None)
    parameters.pop("description", None)
    text = inspect.cleandoc(description).strip() or "Act in the environment."
    return {
        "type": "function",
        "function": {"name": TOOL, "description": text, "parameters": parameters},
    }


@final
class LocalSession:
    """A class of the user's, in this process."""

    def __init__(self, environment: Callable[[], Any], action: type[BaseModel]) -> None:
        self._make = environment
        self._environment: Any = None
        self._action = action

    def reset(self, seed: int, row: Json) -> Json:
        self._environment = self._make()
        parameters = inspect.signature(self._environment.reset).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        given = {"seed": seed, "episode_id": f"{seed:08x}", **row}
        return _answer(
            self._environment.reset(
                **{name: value for name, value in given.items() if takes_all or name in parameters}
            )
        )

    def step(self, action: Json) -> Json:
        return _answer(self._environment.step(self._action.model_validate(action)))


def _answer(observation: Any) -> Json:
    """Raises TypeError for anything but an observation of OpenEnv."""
    if inspect.iscoroutine(observation):
        observation.close()
        raise TypeError("asynchronous environments are not supported: define reset and step")
    if not isinstance(observation, BaseModel):
        raise TypeError(f"{type(observation).__name__} is no observation of OpenEnv")
    return {
        "observation": observation.model_dump(mode="json"),
        "reward": getattr(observation, "reward", None),
        "done": getattr(observation, "done", False),
    }


@final
class ServerSession:
    """An environment of a server, over a connection of its own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: Any = None

    def reset(self, seed: int, row: Json) -> Json:
        from websockets.sync.client import connect

        place = urlsplit(self._address)
        scheme = "wss" if place.scheme == "https" else "ws"
        url = f"{scheme}://{place.netloc}{place.path.rstrip('/')}/ws"
        # Without a proxy of the system: the server is where the recipe says.
        self._connection = connect(
            url, open_timeout=SERVER_SECONDS, max_size=MOST_BYTES, proxy=None
        )
        data = {**row, "seed": seed, "episode_id": f"{seed:08x}"}
        return self._asked({"type": "reset", "data": data})

    def step(self, action: Json) -> Json:
        return self._asked({"type": "step", "data": action})

    def _asked(self, message: Json) -> Json:
        """Raises RuntimeError with what the server says of a mistake."""
        self._connection.send(json.dumps(message))
        answer = json.loads(self._connection.recv())
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict):
            raise RuntimeError("the server answers with something else than an observation")
        if answer.get("type") == "error":
            mistakes = "; ".join(_mistakes(data.get("errors"))) or data.get("message")
            raise RuntimeError(mistakes or "the server failed")
        if not isinstance(data.get("observation"), dict):
            raise RuntimeError("the server answers with something else than an observation")
        return data


def _mistakes(errors: Any) -> list[str]:
    """What pydantic found in a message, each with the name of the field, as the server reports it."""
    if not isinstance(errors, list):
        return [str(errors)] if errors else []
    return [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"
        if isinstance(error, Mapping)
        else str(error)
        for error in errors
    ]


def server_schema(address: str) -> Json:
    """The tool of a server's environment. Raises Unusable where none answers, or without the package for WebSockets."""
    fix = f"start the server at {address}, or correct environment.openenv"
    if find_spec("websockets") is None or find_spec("websockets.sync") is None:
        problem = "environments of a server need the package websockets"
        raise Unusable(problem, "pip install websockets")
    try:
        with urlopen(f"{address.rstrip('/')}/schema", timeout=SERVER_SECONDS) as response:
            schema = json.loads(response.read(MOST_BYTES))
        action = schema["action"]
        if not isinstance(action, Mapping):
            raise TypeError("its schema of actions is no object")
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        problem = f"no OpenEnv server answers at {address}: {error_text(error)}"
        raise Unusable(problem, fix) from error
    return step_schema(dict(action), str(action.get("description", "")))
