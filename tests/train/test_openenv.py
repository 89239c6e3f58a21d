"""Environments of OpenEnv: classes in this process and servers. Oracles: the protocol, and openenv-core where it is."""

import json
import threading
from contextlib import contextmanager

import pytest
from test_tool_functions import call

from bloomery.core.errors import UserError
from bloomery.core.units import Duration
from bloomery.data.chat.tools import ToolCall
from bloomery.plan.types import EpisodesPlan
from bloomery.plan.unsupported import refuse_recipe
from bloomery.recipe.episodes import EnvironmentSection
from bloomery.recipe.load import load_recipe
from bloomery.train.rl.openenv import OVER, SEEDS
from bloomery.train.rl.tools import Tools

# Written from the protocol: actions and observations are models of pydantic, an episode ends with `done`.
FILE = '''
import random
from typing import Any, Optional
from pydantic import BaseModel, ConfigDict, Field


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Move(Action):
    """A guess."""
    n: int = Field(description="from 0 to 7")


class Hint(Observation):
    hint: str = ""


class Game:
    """Guess the secret number."""

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, level: int = 8):
        self.secret = random.Random(seed).randrange(level)
        self.count = 0
        return Hint(hint=f"one of {level}")

    def step(self, action: Move, timeout_s: Optional[float] = None) -> Hint:
        self.count += 1
        right = action.n == self.secret
        return Hint(hint="right" if right else "wrong", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return {"count": self.count}


class Later(Game):
    async def reset(self, seed=None):
        return Hint()


class Odd(Game):
    def reset(self, seed=None):
        return "a text"
'''


def plan(**environment) -> EpisodesPlan:
    section = EnvironmentSection(**{"timeout": Duration(20.0, "seconds"), **environment})
    return EpisodesPlan(tools=(), environment=section, max_turns=4)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return path


def guess(n: int) -> ToolCall:
    return call("step", json.dumps({"n": n}))


SCHEMA = {
    "name": "step",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "description": "from 0 to 7"}},
        "required": ["n"],
    },
}


def assert_plays(tools: Tools, description: str) -> None:
    """Two episodes of the game: of one every number is tried, of the other none."""
    (schema,) = tools.schemas
    assert schema["function"] == {**SCHEMA, "description": description}
    assert tools.has_reward
    texts = tools.reset({0: (SEEDS + 5, {"prompt": "?", "level": 8}), 1: (6, {"level": 3})})
    assert texts == {0: "\n\none of 8", 1: "\n\none of 3"}
    import random

    secret = random.Random(5).randrange(8)
    results = tools.call({0: [guess(n) for n in range(8)]})[0]
    told = [result.text for result in results]
    assert told[:secret] == ["wrong"] * secret and told[secret] == "right\n(the episode is over)"
    assert all(OVER in text for text in told[secret + 1 :])
    assert [result.failed for result in results] == [n > secret for n in range(8)]
    bad = tools.call({1: [call("step", '{"n": "x"}'), call("step", '{"m": 1}')]})[1]
    assert all(result.failed for result in bad)
    assert tools.rewards([0, 1]) == [1.0 - 0.25 * secret, 0.0]


def test_a_class_is_an_environment_with_one_tool(file):
    with Tools(plan(python=f"{file}:Game")) as tools:
        assert_plays(tools, "Guess the secret number.")


@pytest.mark.parametrize(
    ("name", "problem"), [("Later", "asynchronous"), ("Odd", "str is no observation of OpenEnv")]
)
def test_what_is_no_observation_is_told(file, name, problem):
    with Tools(plan(python=f"{file}:{name}")) as tools:
        tools.start()
        with pytest.raises(UserError, match=problem):
            tools.reset({0: (1, {})})


@contextmanager
def server(file):
    """The protocol of a server for one environment a connection."""
    sync_server = pytest.importorskip("websockets.sync.server")
    names: dict = {}
    exec(compile(FILE, str(file), "exec"), names)

    def answer(connection, request):
        if request.path != "/schema":
            return None
        response = connection.respond(
            200, json.dumps({"action": names["Move"].model_json_schema()})
        )
        response.headers["Connection"] = "close"
        return response

    def serve_one(connection):
        game = names["Game"]()
        for message in connection:
            asked = json.loads(message)
            try:
                if asked["type"] == "reset":
                    given = {k: v for k, v in asked["data"].items() if k in ("seed", "level")}
                    seen = game.reset(**given)
                else:
                    seen = game.step(names["Move"].model_validate(asked["data"]))
            except ValueError:
                mistake = {"type": "int_parsing", "loc": ["n"], "msg": "should be a number"}
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
                data["errors"] = [mistake]
                connection.send(json.dumps({"type": "error", "data": data}))
                continue
            observation = seen.model_dump(exclude={"reward", "done", "metadata"})
            data = {"observation": observation, "reward": seen.reward, "done": seen.done}
            connection.send(json.dumps({"type": "observation", "data": data}))

    with sync_server.serve(serve_one, "127.0.0.1", 0, process_request=answer) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        running.shutdown()
        thread.join()


def test_a_server_is_an_environment_with_one_tool(file):
    with server(file) as address, Tools(plan(openenv=address)) as tools:
        assert_plays(tools, "A guess.")
        assert any("may reach the network" in note for note in tools.notes)


def test_a_server_that_is_not_there_is_told():
    pytest.importorskip("websockets")
    tools = Tools(plan(openenv="http://127.0.0.1:9"))
    with pytest.raises(UserError, match="no OpenEnv server answers at") as told:
        tools.start()
    assert told.value.where == "environment.openenv" and told.value.fix


REFUSED = {
    "environment={openenv: 'http://10.0.0.1:8000'}": "another machine",
    "environment={openenv: 'http://127.0.0.1:8000', python: 'a.py:B'}": "not both",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_a_server_elsewhere_is_refused(tmp_path, edit):
    (tmp_path / "a.py").write_text("class B: pass\n")
    (tmp_path / "r.yaml").write_text(
        "model: {preset: go-coder-tiny}\ndata: {path: p.jsonl}\nobjective: grpo\n"
    )
    with pytest.raises(UserError, match=REFUSED[edit]):
        refuse_recipe(load_recipe(str(tmp_path / "r.yaml"), [edit]).recipe)


def test_openenvs_own_class_plays(tmp_path):
    """Of the installed package: its bases in place of the ones above."""
    pytest.importorskip("openenv.core.env_server.interfaces")
    bases = FILE.partition("class Move")
    own = "from openenv.core.env_server.interfaces import Environment\n"
    own += "from openenv.core.env_server.types import Action, Observation\n"
    own += "from pydantic import Field\nimport random\nfrom typing import Optional\n\n"
    text = own + "class Move" + bases[2].replace("class Game:", "class Game(Environment):")
    (tmp_path / "own.py").write_text(text)
    with Tools(plan(python=f"{tmp_path}/own.py:Game")) as tools:
        assert_plays(tools, "Guess the secret number.")
