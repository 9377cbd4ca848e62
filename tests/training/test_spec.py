"""What is trained and how, as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from hybridc.errors import UsageError
from hybridc.json_values import JsonValueError
from hybridc.passes.training.spec import (
    LossTerm,
    Optimizer,
    TrainingSpec,
    loss_to_text,
    optimizer_to_text,
    parse_clip_norm,
    parse_decay,
    parse_loss,
    parse_optimizer,
    spec_from_json,
    spec_to_json,
)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("mse", (LossTerm("mse"),)),
        (
            "softmax_cross_entropy:label_smoothing=0.1",
            (LossTerm("softmax_cross_entropy", label_smoothing=0.1),),
        ),
        ("2*mse(out/1)+l1(b)", (LossTerm("mse", "out/1", 2.0), LossTerm("l1", "b"))),
        (
            "0.5*softmax_cross_entropy(a):label_smoothing=0.2 + 1e-3*bce_with_logits(b)",
            (
                LossTerm("softmax_cross_entropy", "a", 0.5, 0.2),
                LossTerm("bce_with_logits", "b", 1e-3),
            ),
        ),
    ],
)
def test_loss_is_read(text: str, terms: tuple[LossTerm, ...]) -> None:
    assert parse_loss(text) == terms


@pytest.mark.parametrize(
    "text",
    [
        *("", "huber", "mse+l1", "mse(a)+", "mse:label_smoothing=0.1", "2mse", "mse(a) l1(b)", "-1*mse"),
        *("mse(a", "softmax_cross_entropy:label_smoothing=1", "softmax_cross_entropy:label_smoothing="),
    ],
)
def test_other_losses_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_loss(text)
    assert caught.value.code == "HC570" and caught.value.remedy


def test_misspelt_names_are_corrected() -> None:
    with pytest.raises(UsageError) as caught:
        parse_loss("softmax_crossentropy")
    assert "did you mean 'softmax_cross_entropy'?" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        parse_optimizer("adamv:lr=0.1")
    assert re.match("did you mean 'adamw?'", caught.value.remedy)


def test_optimizer_is_read_with_defaults_of_pytorch() -> None:
    assert parse_optimizer("sgd:lr=0.1,momentum=0.9,nesterov=true") == Optimizer("sgd", 0.1, 0.9, True)
    assert parse_optimizer("adam") == Optimizer("adam", 1e-3)
    assert parse_optimizer("adamw:lr=1e-4").weight_decay == 0.01


@pytest.mark.parametrize(
    "text",
    [
        *("rmsprop", "sgd:momentum", "sgd:lr=x", "sgd:lr=nan", "sgd:beta1=0.9", "sgd:lr=1,lr=2"),
        *("sgd:nesterov=1", "adam:beta1=1", "sgd:momentum=-1", "sgd:lr=-1", "adam:eps=-1"),
    ],
)
def test_other_optimizers_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_optimizer(text)
    assert caught.value.code == "HC570"


def test_spec_survives_json() -> None:
    spec = TrainingSpec(
        parse_loss("2*mse(a)+l1(b)"), parse_optimizer("adamw"), 64, 4, ("layer1.*", "fc?"), 0.5, 0.99
    )
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize(
    "text",
    ["mse", "0.5*mse(a)+l1(b)", "softmax_cross_entropy:label_smoothing=0.1", "2*softmax_cross_entropy(y)"],
)
def test_loss_is_written_as_it_is_read(text: str) -> None:
    assert parse_loss(loss_to_text(parse_loss(text))) == parse_loss(text)


@pytest.mark.parametrize(
    "text", ["sgd:lr=0.1,momentum=0.9,nesterov=1", "adam:beta1=0.8,eps=1e-6", "adamw:weight_decay=0.3"]
)
def test_optimizer_is_written_as_it_is_read(text: str) -> None:
    assert parse_optimizer(optimizer_to_text(parse_optimizer(text))) == parse_optimizer(text)


def test_frozen_parameters_are_named_by_patterns() -> None:
    spec = TrainingSpec(freeze=("layer1.*", "onnx::Conv_?"))
    names = ("layer1.0.weight", "layer2.0.weight", "onnx::Conv_1", "onnx::Conv_10")
    assert [spec.trains(name) for name in names] == [False, True, False, True]


def test_batch_must_be_a_multiple_of_its_parts() -> None:
    assert TrainingSpec(batch=64, accumulate=4).micro_batch == 16
    with pytest.raises(UsageError, match="into 3 equal micro-batches"):
        TrainingSpec(batch=64, accumulate=3)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "much", ""])
def test_norm_to_clip_by_is_a_positive_number(text: str) -> None:
    assert parse_clip_norm("1e-1") == TrainingSpec(clip_norm=0.1).clip_norm
    with pytest.raises(UsageError, match="invalid norm to clip gradients by") as caught:
        parse_clip_norm(text)
    assert caught.value.code == "HC570" and caught.value.remedy


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_spec_with_another_norm_is_refused(norm: float) -> None:
    with pytest.raises(UsageError, match="invalid norm to clip gradients by"):
        TrainingSpec(clip_norm=norm)
    data = json.loads(json.dumps(spec_to_json(TrainingSpec()))) | {"clip_norm": norm}
    with pytest.raises(JsonValueError):
        spec_from_json(data)


@pytest.mark.parametrize("decay", ["0", "1", "-0.5", "1.5", "nan", "inf"])
def test_decay_of_averages_is_between_0_and_1(decay: str) -> None:
    assert parse_decay("0.999") == TrainingSpec(ema=0.999).ema
    for make in (lambda: parse_decay(decay), lambda: TrainingSpec(ema=float(decay))):
        with pytest.raises(UsageError, match="invalid decay of averages") as caught:
            make()
        assert caught.value.code == "HC570" and caught.value.remedy
    data = json.loads(json.dumps(spec_to_json(TrainingSpec()))) | {"ema": float(decay)}
    with pytest.raises(JsonValueError):
        spec_from_json(data)
