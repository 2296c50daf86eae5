import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from torchtitan_ft import runtime


def test_torchtitan_sees_a_cpu_machine() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator; the runtime stays out of the way")
    from torchtitan.components.metrics import DeviceMemoryMonitor
    from torchtitan.tools.utils import device_type

    assert device_type == "cpu"
    stats = DeviceMemoryMonitor("cpu").get_peak_stats()
    assert 0.01 < stats.max_reserved_gib < 24  # the resident set of this process, not nothing


def test_too_late_is_an_error() -> None:
    code = (
        "import torchtitan.tools.utils as u; u.device_type = 'cuda'\n"
        "from torchtitan_ft import runtime; runtime.activate()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if torch.accelerator.is_available():
        pytest.skip("nothing is patched here")
    assert done.returncode == 1
    assert "must run before torchtitan's import" in done.stderr


def test_flex_attention_is_replaced_on_cpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("FlexAttention works here")
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = runtime.adapt_config(llama3_debugmodel())
    assert config.model_spec is not None
    model = config.model_spec.model
    assert not list(model.traverse(FlexAttention.Config))
    assert len(list(model.traverse(ScaledDotProductAttention.Config))) == 6
    assert config.training.disable_cuda_graphs


def _pair() -> tuple[socket.socket, socket.socket, int]:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    server.close()
    return client, accepted, port


def test_only_new_and_unspared_sockets_are_cut() -> None:
    old = _pair()
    sockets = runtime.GlooSockets(spare=(), store=0)
    spared = _pair()
    fresh = _pair()
    store = _pair()
    sockets._spare = frozenset({spared[2], store[2]})
    sockets._store = store[2]
    # Both ends live in this process; of the store's, the client's is cut, though the port is spared.
    assert sockets.shut_down() == 3
    assert fresh[0].recv(1) == b""
    assert store[0].recv(1) == b""
    for pair in (old, spared):
        pair[0].sendall(b"x")
        assert pair[1].recv(1) == b"x"
    sockets.shut_down()  # again, for connections made meanwhile: harmless
    for pair in (old, spared, fresh, store):
        pair[0].close()
        pair[1].close()


def test_failures_of_peers_are_told_from_the_users_own() -> None:
    yes = [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed"
        ),
        RuntimeError("Connection reset by peer"),
        dist.DistNetworkError("failed to recv"),
        ConnectionResetError(104, "x"),
    ]
    no = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("connection closed by peer"),
        RuntimeError("not finite at step 3"),
        AssertionError(),
        MemoryError(),
    ]
    assert [runtime.is_communication_failure(e) for e in yes] == [True] * len(yes)
    assert [runtime.is_communication_failure(e) for e in no] == [False] * len(no)


def test_private_cache_clearing_still_exists() -> None:
    runtime.clear_dead_mesh_caches()
