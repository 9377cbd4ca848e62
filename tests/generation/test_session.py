"""Compiled decoders against onnxruntime, and sessions that append, rewind and fork."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import pytest

import hybridc
from hybridc import models
from hybridc.errors import UsageError
from hybridc.generation import GenerationSession, Sampling
from tests.support.decoders import CONTEXT, VOCABULARY, appending, greedy, llama, with_open_lengths

PROMPT = [5, 17, 200, 3, 99, 42, 8, 150, 77, 31, 64]


def tokens_of(session: GenerationSession, most: int, prompt: list[int] = PROMPT) -> list[int | None]:
    return [token for (token,) in session.generate([prompt], most)]


@pytest.mark.isa("avx2")
@pytest.mark.parametrize(
    "name", ["float32", "int4", pytest.param("appending", marks=pytest.mark.slow), "optimum"]
)
def test_two_hundred_tokens_are_those_of_onnxruntime(name: str, artifacts: dict[str, Path]) -> None:
    """Which appends to its past where the model lets it."""
    growing = {"appending": appending, "float32": with_open_lengths, "optimum": appending}
    model = growing[name]() if name in growing else llama()
    wanted = list(islice(greedy(model, PROMPT, in_places=name not in growing), 200))
    with hybridc.load_generation(artifacts[name]) as session:
        assert tokens_of(session, 200) == wanted
    assert len(set(wanted)) > 5


@pytest.mark.slow
@pytest.mark.isa("avx2")
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_drawn_decoders_are_those_of_onnxruntime(seed: int, int4: bool, tmp_path: Path) -> None:
    """Of any number of heads, groups, widths and positions; the cache is filled nearly to its end."""
    draw = np.random.default_rng([seed, int4])
    kv_heads, group, depth = (int(draw.choice(n)) for n in ((1, 2, 3), (1, 2, 3, 5), (16, 32, 64)))
    context, start = int(draw.integers(210, 700)), int(draw.integers(1, 100))
    unit = 32 // np.gcd(32, kv_heads * group * depth)  # blocks of 32 divide the width
    model = models.build(
        "llama",
        context=context,
        layers=1,
        hidden=kv_heads * group * depth * int(unit),
        heads=kv_heads * group * int(unit),
        kv_heads=kv_heads,
        feed_forward=32 * int(draw.integers(1, 6)),
        vocabulary=VOCABULARY,
        int4=int4,
        seed=seed,
    )
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2", dims={"sequence": [1]})
    prompt = draw.integers(0, VOCABULARY, min(start, context - 200)).tolist()
    wanted = list(islice(greedy(model, prompt, in_places=True), 200))
    with hybridc.load_generation(tmp_path / "m.hyb") as session:
        assert tokens_of(session, 200, prompt) == wanted


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("name", ["float32", "appending", "optimum"])
def test_rewind_and_fork_go_on_as_a_new_session_would(name: str, artifacts: dict[str, Path]) -> None:
    with hybridc.load_generation(artifacts[name]) as session:
        session.append([PROMPT])
        other = session.fork()
        session.append([[1, 2, 3]])
        session.rewind(len(PROMPT) - 2)
        assert session.sequences == (tuple(PROMPT[:-2]),)
        both = [session.append([PROMPT[-2:]]) for _ in (0,)] + [other.append([[7]])]
        again = session.append([[7]])
    with hybridc.load_generation(artifacts[name]) as fresh:
        wanted = fresh.append([PROMPT]), fresh.append([[7]])
    np.testing.assert_allclose(both[0], wanted[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(both[1], wanted[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(again, wanted[1], rtol=0, atol=1e-5)


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("name", ["float32", "int4"])
def test_a_step_copies_no_cache(name: str, artifacts: dict[str, Path]) -> None:
    """All keys and values have the place of those before them."""
    with hybridc.load_generation(artifacts[name]) as session:
        decoder = session._decoder
        outputs, run = [], decoder.session.run

        def noted(wanted: list[str], feeds: dict[str, np.ndarray], **more: object) -> list[np.ndarray]:
            outputs.append((set(wanted), set(feeds)))
            return run(wanted, feeds, **more)  # type: ignore[arg-type]

        decoder.session.run = noted  # type: ignore[method-assign, assignment]
        session.append([PROMPT[:1]])
        session.append([PROMPT[1:2]])
    assert outputs[-1] == ({"logits"}, {"input_ids", "attention_mask"})


@pytest.mark.isa("avx2")
def test_code_for_one_token_and_for_several_shares_weights(artifacts: dict[str, Path]) -> None:
    given = sum(len(each.raw_data) for each in with_open_lengths().graph.initializer)
    assert (artifacts["float32"] / "weights.bin").stat().st_size < 1.3 * given


@pytest.mark.isa("avx2")
def test_sequences_of_a_batch_are_independent(artifacts: dict[str, Path]) -> None:
    """Of different lengths, and one ends before the other."""
    prompts = [PROMPT, PROMPT[3:5]]
    singles = []
    for prompt in prompts:
        with hybridc.load_generation(artifacts["float32"]) as session:
            singles.append(tokens_of(session, 12, prompt))
    end = singles[0][3]
    wanted = [single[: single.index(end) + 1] if end in single else single for single in singles]
    with hybridc.load_generation(artifacts["pair"]) as session:
        steps = list(session.generate(prompts, 12, stop_ids=[int(end or 0)]))
    for row, tokens in enumerate(zip(*steps, strict=True)):
        assert [token for token in tokens if token is not None] == wanted[row]
        assert all(token is None for token in tokens[len(wanted[row]) :])


@pytest.mark.isa("avx2")
def test_what_cannot_be_appended_is_refused_and_nothing_is_lost(artifacts: dict[str, Path]) -> None:
    with hybridc.load_generation(artifacts["float32"]) as session:
        before = session.append([PROMPT])
        for code, tokens in (
            ("HC591", [[VOCABULARY]]),
            ("HC591", [[-1]]),
            ("HC592", [[1] * CONTEXT]),
            ("HC596", [[1], [2]]),
        ):
            with pytest.raises(UsageError) as caught:
                session.append(tokens)
            assert caught.value.code == code
        with pytest.raises(UsageError) as caught:
            list(session.generate([[1]], CONTEXT))
        assert caught.value.code == "HC592"
        with pytest.raises(UsageError) as caught:
            session.rewind(len(PROMPT) + 1)
        assert caught.value.code == "HC596"
        assert session.sequences == (tuple(PROMPT),)
        session.rewind(len(PROMPT) - 1)
        np.testing.assert_allclose(session.append([PROMPT[-1:]]), before, rtol=0, atol=1e-5)


@pytest.mark.isa("avx2")
def test_a_cache_can_be_filled_to_its_end(artifacts: dict[str, Path]) -> None:
    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, CONTEXT).tolist()
    with hybridc.load_generation(artifacts["float32"]) as session:
        at_once = session.append([prompt])
        with pytest.raises(UsageError, match="HC592"):
            session.append([[1]])
        session.rewind(0)
        for token in prompt:
            one_by_one = session.append([[token]])
    np.testing.assert_allclose(at_once, one_by_one, rtol=0, atol=1e-5)


@pytest.mark.isa("avx2")
def test_logits_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = appending()
    head = next(each for each in model.graph.initializer if each.name == "head")
    head.raw_data = np.full(list(head.dims), np.nan, np.float32).tobytes()
    fixed = {"n": 1, "past": 8, "total": 9}
    hybridc.compile(model, tmp_path / "nan.hyb", target="avx2", dims=fixed)
    with hybridc.load_generation(tmp_path / "nan.hyb") as session:
        with pytest.raises(UsageError) as caught:
            session.append([PROMPT[:2]])
        assert caught.value.code == "HC593"
        assert session.sequences == ((),)


@pytest.mark.isa("avx2")
def test_a_session_goes_on_after_logits_that_were_not_numbers(tmp_path: Path) -> None:
    """Of a token whose embedding is none: its keys and values leave nothing behind."""
    model, bad = llama(int4=False), 7
    table = next(each for each in model.graph.initializer if each.name.startswith("embedding"))
    weights = onnx.numpy_helper.to_array(table).copy()
    weights[bad] = np.nan
    table.CopyFrom(onnx.numpy_helper.from_array(weights, table.name))
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2", dims={"sequence": 1})
    with hybridc.load_generation(tmp_path / "m.hyb") as session:
        session.append([PROMPT])
        with pytest.raises(UsageError) as caught:
            session.append([[bad]])
        assert caught.value.code == "HC593"
        after = session.append([[1]])
        session.rewind(0)
        fresh = session.append([[*PROMPT, 1]])
    np.testing.assert_array_equal(after, fresh)


@pytest.mark.isa("avx2")
def test_draws_depend_on_the_seed_alone(artifacts: dict[str, Path]) -> None:
    made = []
    for seed in (1, 1, 2):
        with hybridc.load_generation(artifacts["float32"]) as session:
            steps = session.generate([PROMPT], 20, Sampling(temperature=1.0, top_k=50, seed=seed))
            made.append([token for (token,) in steps])
    assert made[0] == made[1] != made[2]


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("kept", [0, 5])
def test_a_full_context_shifts(kept: int, artifacts: dict[str, Path]) -> None:
    """Tokens are onnxruntime's, whose sequence begins anew with what stays."""
    sequence, wanted = list(PROMPT), list[int]()
    while len(wanted) < 400:
        room = CONTEXT - len(sequence) + 1
        made = list(islice(greedy(llama(int4=False), sequence, in_places=True), room))
        wanted += made
        sequence += made[:-1]
        rest = sequence[kept:]
        sequence = [*sequence[:kept], *rest[-(len(rest) // 2) :], made[-1]]
    with hybridc.load_generation(artifacts["float32"]) as session:
        found = [token for (token,) in session.generate([PROMPT], 400, shift=kept)]
        assert found == wanted[:400]
        with pytest.raises(UsageError, match="cannot stay"):
            session.generate([PROMPT], 1, shift=CONTEXT)


@pytest.mark.isa("avx2")
def test_a_mask_that_follows_has_a_plan_for_each_number_of_new_tokens(artifacts: dict[str, Path]) -> None:
    """As its dimension is a sum, and no plan for another number of positions."""
    with hybridc.load_generation(artifacts["optimum"]) as generation:
        session = generation._decoder.session
        sizes = [list(bucket.sizes.values()) for bucket in session.buckets()]
        assert sizes == [[(1, 1), (CONTEXT + 1,) * 2], [(8, 8), (CONTEXT + 8,) * 2]]
        feeds = {node.name: np.zeros(node.shape, np.int64) for node in session.get_inputs()[:3]}
        feeds |= {node.name: np.zeros(node.shape, np.float32) for node in session.get_inputs()[3:]}
        with pytest.raises(UsageError) as caught:
            session.run(None, {**feeds, "attention_mask": np.zeros((1, CONTEXT + 1), np.int64)})
    assert caught.value.code == "HC554" and "no plan for sequence_length=8, " in str(caught.value)


@pytest.mark.isa("avx2")
def test_a_mask_of_another_length_than_past_and_new_tokens_is_refused(tmp_path: Path) -> None:
    """Of one that is cut by the network itself."""
    model = appending()
    next(node for node in model.graph.node if node.op_type == "Cast").input[0] = "shorter"
    model.graph.node.insert(
        0, onnx.helper.make_node("Slice", ["attention_mask", "second", "most", "second"], ["shorter"])
    )
    for name, value in (("second", 1), ("most", 99)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2", dims={"n": 1, "past": 8, "total": 10})
    with pytest.raises(UsageError) as caught:
        hybridc.load_generation(tmp_path / "m.hyb")
    assert caught.value.code == "HC590" and "attention_mask" in str(caught.value)


@pytest.mark.isa("avx2")
def test_a_growing_present_without_positions_is_refused(tmp_path: Path) -> None:
    model = appending()
    positions = next(each for each in model.graph.input if each.name == "position_ids")
    model.graph.input.remove(positions)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[0]]), "position_ids"))
    hybridc.compile(model, tmp_path / "m.hyb", target="avx2", dims={"n": 1, "past": 8, "total": 9})
    with pytest.raises(UsageError) as caught:
        hybridc.load_generation(tmp_path / "m.hyb")
    assert caught.value.code == "HC590" and "export it with the input position_ids" in caught.value.remedy


@pytest.mark.isa("avx2")
def test_other_artifacts_are_refused(tmp_path: Path) -> None:
    hybridc.compile(models.build("mlp", inputs=8, hidden=8), tmp_path / "m.hyb", target="avx2")
    with pytest.raises(UsageError) as caught:
        hybridc.load_generation(tmp_path / "m.hyb")
    assert caught.value.code == "HC590"
