"""A pool's lines to its proxies, without Ray: what one of them sends does not reach the others."""

import os
import queue
import subprocess
import sys
from multiprocessing.connection import Client

import pytest

pytest.importorskip("ray")

from ray import cloudpickle

from hydra_tune.integrations.ray_node.messages import GoOn, Raised, StopTrial
from hydra_tune.integrations.ray_node.proxy_connections import ProxyConnections
from paths import python_path


class NotHere:
    """Cannot be read where it arrives, as what a module of the driver's alone has made."""

    def __reduce__(self):
        return __import__, ("a_module_that_is_not_here",)


@pytest.fixture
def heard():
    return queue.SimpleQueue()


@pytest.fixture
def lines(heard):
    def hears(line, said):
        heard.put((line, said))
        if isinstance(said, StopTrial):
            raise ValueError(said.reason)

    return ProxyConnections(hears)


def connected(lines):
    return Client(lines.address, authkey=lines.key)


def say(client, message):
    client.send_bytes(cloudpickle.dumps(message))


def error_on(client):
    message = cloudpickle.loads(client.recv_bytes())
    assert isinstance(message, Raised)
    return cloudpickle.loads(message.error)


def test_what_cannot_be_read_is_answered_and_the_line_goes_on(lines, heard):
    client = connected(lines)
    say(client, NotHere())
    assert isinstance(error_on(client), ModuleNotFoundError)
    say(client, GoOn())
    assert heard.get(timeout=10)[1] == GoOn()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket is a file")
def test_a_pool_that_is_killed_leaves_no_file(tmp_path):
    """Each left a folder of its listener in the temporary directory."""
    script = """if True:
        import os
        from hydra_tune.integrations.ray_node.proxy_connections import ProxyConnections
        print(ProxyConnections(print).address, flush=True)
        os._exit(0)"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": python_path()}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_who_hears_is_answered_and_other_lines_go_on(lines, heard):
    client, other = connected(lines), connected(lines)
    say(client, StopTrial("no such thing"))
    assert str(error_on(client)) == "no such thing"
    say(other, GoOn())
    line, said = [heard.get(timeout=10) for _ in range(2)][-1]
    line.say(said)
    assert cloudpickle.loads(other.recv_bytes()) == GoOn()


def test_the_end_of_a_line_is_heard_once(lines, heard):
    client, other = connected(lines), connected(lines)
    say(client, GoOn())
    line, _ = heard.get(timeout=10)
    client.close()
    assert heard.get(timeout=10) == (line, None)
    line.say(GoOn())  # to nobody
    say(other, GoOn())
    assert heard.get(timeout=10)[1] == GoOn()
    assert heard.empty()


def test_who_has_no_key_has_no_line(lines, heard):
    from multiprocessing import AuthenticationError

    with pytest.raises(AuthenticationError):
        Client(lines.address, authkey=b"another")
    say(connected(lines), GoOn())
    assert heard.get(timeout=10)[1] == GoOn()
