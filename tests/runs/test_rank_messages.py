"""Messages between the processes of a launch where connections, folders and lines are not as usual."""

import asyncio
import json
import logging
import signal
import socket
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from runs_of_bloomery import wait_for

from bloomery.launch import rank_messages, supervisor
from bloomery.launch.rank_messages import Member, MessageClient, MessageServer, State

VARIABLES = ("RANK", "WORLD_SIZE")


def member(rank: int) -> Member:
    return Member(rank, 2, 100 + rank, f"n{rank}", "launch")


@pytest.fixture
def server(tmp_path):
    """That of rank 0, whose file is `server.json` in the temporary folder."""
    with closing(MessageServer(member(0), VARIABLES)) as server:
        server.start(tmp_path / "server.json", None)
        yield server


def connected(folder: Path, process: Member) -> socket.socket:
    """A connection on which the process has come."""
    entry = json.loads((folder / "server.json").read_text())
    connection = socket.create_connection((entry["address"], entry["port"]))
    words = ({"token": entry["token"]}, {"kind": "member", "member": asdict(process)})
    for message in words:
        connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


def test_a_process_that_came_again_is_not_lost_with_its_earlier_connection(
    server, tmp_path, monkeypatch
) -> None:
    """A network fails for a moment: rank 0's host sees the end of a connection after the next one has begun."""
    monkeypatch.setattr(rank_messages, "LOST_SECONDS", 0.0)
    process = member(1)
    with connected(tmp_path, process) as earlier:
        wait_for(lambda: server.present_ranks() == {0, 1})
        with connected(tmp_path, process) as later:
            assert later.recv(1)  # the state, after which the process has come
            later.settimeout(5)
            wait_for(lambda: len(server._connections) == 2)
            second = member(2)
            later.sendall(json.dumps({"kind": "member", "member": asdict(second)}).encode() + b"\n")
            wait_for(lambda: 2 in server.present_ranks())
            earlier.close()
            wait_for(lambda: len(server._connections) == 1)
            assert server.end_of(1) is None and server.present_ranks() == {0, 1, 2}
        wait_for(lambda: server.end_of(1) is not None)
        assert server.end_of(1)["code"] == -signal.SIGKILL
        assert server.present_ranks() == {0}


def test_a_process_without_a_folder_for_sockets_still_talks_to_rank_0(
    server, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/missing")  # a path that is short enough for a socket
    server.publish({"attempt": 0}, 0)
    client = MessageClient(member(1), tmp_path / "server.json", State)
    with closing(client):
        client.start()
        wait_for(lambda: client.state.message == {"attempt": 0})
        client.end(0, {"code": 3})
        wait_for(lambda: server.end_of(1) == {"code": 3})


def test_processes_of_a_host_that_end_together_print_nothing(server, tmp_path, monkeypatch) -> None:
    """Each talks for the host in turn, and ends while another has just connected to it."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    told = list[str]()
    monkeypatch.setattr(logging.getLogger("asyncio"), "error", lambda text, **_: told.append(text))
    for _ in range(3):
        clients = [
            MessageClient(member(rank), tmp_path / "server.json", State) for rank in range(1, 5)
        ]
        for client in clients:
            client.start()
        wait_for(lambda: server.present_ranks() == {0, 1, 2, 3, 4})
        for client in clients:
            client.close()
        wait_for(lambda: server.present_ranks() == {0})
    assert told == []


def test_a_process_that_ends_as_it_begins_to_listen_leaves_no_socket(tmp_path, monkeypatch) -> None:
    """The others of its host would connect to it, and wait for an answer that never comes."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    sleep = asyncio.sleep
    # asyncio lets other tasks run when a server has begun to listen: long enough to be ended there.
    monkeypatch.setattr(asyncio.tasks, "sleep", lambda seconds: sleep(seconds or 60))
    client = MessageClient(member(1), tmp_path / "server.json", State)
    place = client._socket_path()
    assert place is not None
    client.start()
    wait_for(place.exists)
    time.sleep(0.05)
    client.close()
    assert not place.exists()


def test_the_longest_output_of_a_rank_fits_into_one_message(tmp_path) -> None:
    program = (
        f"for _ in range({supervisor.TAIL_LINES}): print('\\U0001f525' * 20000)\nprint('the end')"
    )
    process = supervisor._Process([sys.executable, "-c", program], (), {}, (), lambda _: None)
    with closing(process):
        tail = process.result("train", 1).tail
    assert tail[-1] == "the end" and len(tail) == supervisor.TAIL_LINES
    assert len(json.dumps({"tail": tail})) < rank_messages.LINE_BYTES
