"""Published experiments, in small: their graphs have the costs and sizes that the papers' have."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridc.ir import Device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import published
    import published.__main__
    import published.checkmate
    import published.moccasin

    yield published
    for name in [name for name in sys.modules if name.split(".")[0] == "published"]:
        del sys.modules[name]


@pytest.fixture
def checkmate(published: Any) -> Any:
    return published.checkmate


@pytest.fixture
def moccasin(published: Any) -> Any:
    return published.moccasin


def test_vgg19_has_the_parameters_and_multiplications_that_are_known_of_it(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    assert sum(layer.parameters for layer in layers) == 143_667_240
    assert sum(layer.cost for layer in layers) == pytest.approx(19.6e9, rel=0.01)


def test_a_step_costs_three_forward_passes_and_holds_every_result_once(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    graph, times_us = checkmate.training(layers, 2)
    assert sum(times_us.values()) == pytest.approx(3 * checkmate.FORWARD_US)
    made = sum(tensor.size_bytes for tensor in graph.tensors)
    assert made == 2 * 4 * (2 * sum(layer.elements for layer in layers) + 1)
    assert all(kernel.devices == (Device.GPU,) for kernel in graph.kernels)


def test_what_fits_whole_computes_nothing_again(checkmate: Any) -> None:
    layers = checkmate.vgg19()
    assert checkmate.step_us(layers, 50, 0.05) == pytest.approx(3 * checkmate.FORWARD_US)
    assert checkmate.step_us(layers, 100_000, 0.05) == float("inf")


@pytest.mark.parametrize(
    ("network", "count", "parameters", "edges"),
    [("mobilenet", 92, 4_253_864, 367), ("unet", 35, 12_332_755, 148), ("vgg19", 25, 143_667_240, 99)],
)
def test_networks_have_the_layers_parameters_and_edges_of_the_keras_ones(
    checkmate: Any, network: str, count: int, parameters: int, edges: int
) -> None:
    layers = getattr(checkmate, network)()
    assert len(layers) == count
    assert sum(layer.parameters for layer in layers) == parameters
    graph, _ = checkmate.training(layers, 1)
    assert sum(len(kernel.inputs) for kernel in graph.kernels if kernel.name != "end") == edges


def test_a_skipped_result_is_read_by_both_readers_and_their_gradients(checkmate: Any) -> None:
    layers = checkmate.unet()
    graph, _ = checkmate.training(layers, 1)
    reads = {kernel.name: kernel.inputs for kernel in graph.kernels}
    assert layers[18].skipped == 9 and reads["f18"] == ("f17", "f9")
    assert reads["g9"] == ("f9", "f10", "g10", "f18", "g18")
    # as the authors' graph has them, for one sample
    assert [layers[i].elements for i in (0, 14, 18, 19, 34)] == [16187392, 573440, 3035136, 3234816, 1201408]


def test_layered_graphs_have_the_nodes_of_theirs_and_about_as_many_edges(moccasin: Any) -> None:
    edges = {100: 236, 250: 944, 500: 2461, 1000: 5875}
    for instance in moccasin.INSTANCES[:2]:
        layered = moccasin.drawn(instance)
        assert layered == moccasin.drawn(instance) != moccasin.drawn(instance, seed=2)
        assert len(layered.reads) == instance.nodes
        assert sum(map(len, layered.reads)) == pytest.approx(edges[instance.nodes], rel=0.25)
        assert all(source < node for node, sources in enumerate(layered.reads) for source in sources)
        read = {source for sources in layered.reads for source in sources}
        assert read == set(range(instance.nodes - 1))
        assert all(layered.reads[1:])


def test_the_memory_of_an_order_is_the_most_that_is_alive(moccasin: Any) -> None:
    # two branches of one source: at their join the source is no longer needed
    layered = moccasin.Layered(((), (0,), (0,), (1, 2)), (5, 10, 20, 1), (0, 1, 1, 0))
    assert layered.peak == 5 + 10 + 20


def test_a_graph_file_is_read_in_its_own_order(moccasin: Any, tmp_path: Path) -> None:
    nodes = [{"name": n, "out_cost": 10 * (n + 1), "duration": n} for n in range(3)]
    links = [{"0": 0, "1": 2}, {"0": 2, "1": 1}]
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": nodes, "links": links, "graph": {"order": [0, 2, 1]}}))
    assert moccasin.read(path) == moccasin.Layered(((), (0,), (1,)), (10, 30, 20), (0, 2, 1))


def test_what_fits_computes_nothing_again_and_copies_do_not_count(moccasin: Any) -> None:
    layered = moccasin.drawn(moccasin.Instance(30, 0.3, 0.4, {}))
    again, bound = moccasin.planned(layered, 1.2, 0.05)
    assert again == pytest.approx(0) and bound == pytest.approx(0)
    less, bound = moccasin.planned(layered, 0.85, 0.05)
    assert less is None or less >= bound - 1e-9


def test_new_rows_replace_those_of_the_same_experiment(published: Any) -> None:
    main = published.__main__
    known = [
        {"experiment": "a", "ours": 1},
        {"experiment": "b", "ours": 2},
        {"experiment": "c", "not_repeated": ""},
    ]
    rows = main.merged(known, [{"experiment": "b", "ours": 3}])
    assert rows[:2] == [{"experiment": "a", "ours": 1}, {"experiment": "b", "ours": 3}]
    assert {row["experiment"] for row in rows[2:]} == set(main.NOT_REPEATED)
