import pytest
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from torchtitan_ft.membership import World
from torchtitan_ft.mesh import data_parallel_degree, domain_shard_degree
from torchtitan_ft.trainer import adapt_config, batch_plan, check_supported


@pytest.mark.parametrize(
    "name",
    [
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
        "expert_parallel_degree",
        "data_parallel_replicate_degree",
    ],
)
def test_what_does_not_work_yet_is_refused_by_name(name: str) -> None:
    config = adapt_config(llama3_debugmodel())
    check_supported(config)
    setattr(config.parallelism, name, 2)
    with pytest.raises(ValueError, match=f"parallelism.{name}"):
        check_supported(config)


def test_the_global_batch_does_not_follow_the_live_world() -> None:
    config = adapt_config(llama3_debugmodel())
    config.training.local_batch_size = 3
    config.fault_tolerance.domains = 4

    def plan(live: int):
        names = tuple(map(str, range(live)))
        return batch_plan(config, World(1, names, 0, 0, 2, 1, "x:1", ()))

    assert {plan(n).global_batch for n in (1, 2, 3, 4, 5)} == {3 * 2 * 4}
    assert [plan(n).degree for n in (1, 4)] == [2, 8]


def test_degrees_describe_one_domain() -> None:
    parallelism = adapt_config(llama3_debugmodel()).parallelism
    assert domain_shard_degree(parallelism, 4) == 4
    assert data_parallel_degree(parallelism, 4, 3) == 12
    parallelism.data_parallel_shard_degree = 3
    with pytest.raises(ValueError, match=r"3 ranks by .*but a domain has 4"):
        domain_shard_degree(parallelism, 4)
