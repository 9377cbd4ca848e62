"""A training step as a program: loss, gradients, and new states from old ones.

Three programs are made of a network. All take its inputs, targets and states, and return the loss first:

- the step: with the optimizer's scalars, returns the new states;
- the accumulation, where a batch is processed in parts: returns the new sums of gradients;
- the evaluation: BatchNorm by its running statistics and without dropout, returns the network's outputs.

And a fourth where a batch is processed in parts, which may be on several ranks:

- the update: from states and sums of gradients over all parts, returns the new states.

Where gradients are clipped by their global norm, the step computes all of them before the new states.

A batch that need not be whole is padded: what lies behind its examples is in no mean, and has no gradient.
The model was read with an open batch dimension, so that no example depends on others but by such means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import relax

from hybridc.errors import UsageError
from hybridc.frontend import ImportedModel, ValueInfo
from hybridc.frontend.names import safe_names, unique_names
from hybridc.labels import Labels
from hybridc.passes.program.program import Program, ProgramBuilder, tensor_dtype, tensor_shape
from hybridc.passes.training import losses
from hybridc.passes.training import spec as specs
from hybridc.passes.training.clipping import clipped
from hybridc.passes.training.differentiate import SEED, Differentiated, Update, differentiate
from hybridc.passes.training.gradients import Emitter, constant
from hybridc.passes.training.network import NetworkCopy, evaluated, is_training_norm, with_statistics
from hybridc.passes.training.optimizers import Adam, Averaged, Sgd, UpdateRule, emit_update
from hybridc.passes.training.spec import NEW, LossTerm, TrainingSpec
from hybridc.passes.training.split import split_model
from hybridc.passes.training.splits import SplitParameter, Splits

PARAMETER, STATISTIC, MOMENT, SUM = "parameter", "statistic", "moment", "sum"
"""Kinds of states: a weight, BatchNorm's running mean or variance, the optimizer's, a sum of gradients."""
_GRADIENT = "gradient"
"""Suffix of what a step that clips computes first."""
_SHARE = "#share"
"""Of the input that a part's loss is multiplied by."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A tensor that is kept from step to step."""

    name: str
    """That of a parameter or statistic in the user's model; of optimizer state that, `#`, and its kind."""
    kind: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TrainingPrograms:
    """The programs to compile. The new value of a state is the output of its name with `NEW` appended."""

    step: ImportedModel
    evaluation: ImportedModel
    accumulation: ImportedModel | None
    """None unless batches are gone through in parts."""
    update: ImportedModel | None
    """Likewise."""
    states: tuple[TrainingState, ...]
    targets: tuple[ValueInfo, ...]
    loss: str
    """Name of the first output of each program."""
    scalars: Mapping[str, str]
    """Names of the optimizer's scalars as the step's inputs."""
    seed: str | None
    """Name of the input, an int64, that dropout draws from: another one each step. None without dropout."""
    splits: Splits
    """Parameters and moments that are several states, by the names that the user has for them."""
    sizes: tuple[str, ...]
    """Names of the inputs, int64[1], that say how many examples there are; none if batches are whole."""
    share: str | None
    """Name of the input that is a part's number of examples over the mean of all parts'; None if there are no
    parts, or all are alike."""
    cuts: Mapping[str, tuple[int, ...]]
    """By output of the evaluation, axes along which it has an entry for each example, and padding."""


def training_programs(
    model: ImportedModel, spec: TrainingSpec, *, split_layers: bool = False
) -> TrainingPrograms:
    """The programs of one training step.

    `split_layers` computes dominating fully connected layers in parts, so that their gradients never exist
    as a whole: for devices whose memory is small.

    Requires: `model` is read for training. Raises UsageError HC574 for a loss that does not fit the model's
    outputs; ModelError as `differentiate` does.
    """
    model, splits = split_model(model) if split_layers else (model, {})
    network = _Network.of(model, spec)
    step = network.step()
    accumulation = network.accumulation() if spec.accumulate > 1 else None
    evaluation = network.evaluation()
    return TrainingPrograms(
        step=step,
        evaluation=evaluation,
        accumulation=accumulation,
        update=None if accumulation is None else network.update(accumulation),
        states=tuple(network.states.values()),
        targets=network.targets,
        loss=network.loss_name,
        scalars={name: network.extra[name].name for name in network.optimizer.scalars},
        seed=next((v.name for v in step.inputs if v.variable == SEED), None),
        splits=_splits_of_states(splits, ("", *network.optimizer.states)),
        sizes=tuple(v.name for v in model.sizes),
        share=network.share.name if network.share is not None else None,
        cuts={v.name: tuple(axis for axis, _ in v.cuts) for v in model.outputs if v.cuts},
    )


def _splits_of_states(splits: Splits, suffixes: Sequence[str]) -> dict[str, SplitParameter]:
    """Moments are split as their parameters are."""
    return {
        _state_name(name, suffix): replace(
            split, parts=tuple(_state_name(part, suffix) for part in split.parts)
        )
        for name, split in splits.items()
        for suffix in suffixes
    }


def _optimizer(spec: TrainingSpec) -> UpdateRule:
    rule = _plain_optimizer(spec.optimizer)
    return rule if spec.ema is None else Averaged(rule)


def _plain_optimizer(spec: specs.Optimizer) -> Sgd | Adam:
    if spec.kind == "sgd":
        return Sgd(momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay)
    return Adam(spec.beta1, spec.beta2, spec.eps, spec.weight_decay, decoupled=spec.kind == "adamw")


@dataclass
class _Network:
    """A network read for training, and what its programs have in common."""

    model: ImportedModel
    spec: TrainingSpec
    optimizer: UpdateRule
    terms: tuple[tuple[LossTerm, int], ...]
    """With the position of the output that each is about."""
    targets: tuple[ValueInfo, ...]
    loss_name: str
    states: dict[str, TrainingState] = field(default_factory=dict)
    extra: dict[str, ValueInfo] = field(default_factory=dict)
    """Inputs that the model has not: scalars, moments and sums, by scalar's name or by state's name."""

    @staticmethod
    def of(model: ImportedModel, spec: TrainingSpec) -> _Network:
        terms = tuple((term, _output_position(term, model)) for term in spec.loss)
        (loss_name,) = unique_names([*(v.name for v in model.outputs), "loss"])[-1:]
        _check_examples(model, spec, terms)
        network = _Network(model, spec, _optimizer(spec), terms, _targets(terms, model), loss_name)
        for value in model.inputs:
            if value.name in model.parameters:
                kind = STATISTIC if value.variable in network.statistics else PARAMETER
                network.states[value.name] = TrainingState(value.name, kind, value.shape, value.dtype)
        network._add_extra_inputs()
        return network

    def __post_init__(self) -> None:
        self.program = Program(self.model.module, self.model.weights, self.model.origins)
        self.statistics = {
            argument.name
            for binding in self.program.bindings
            if is_training_norm(binding.value)
            for argument in binding.value.args[3:]
        }

    @property
    def examples(self) -> str | None:
        """The variable that says how many examples of the batch there are; None if it is whole."""
        return self.model.sizes[0].variable if self.spec.has_padding else None

    @property
    def share(self) -> ValueInfo | None:
        """The input that a part's loss is multiplied by."""
        return self.extra.get(_SHARE)

    @property
    def parameters(self) -> list[ValueInfo]:
        """Inputs that gradients are with respect to."""
        return [v for v in self.model.inputs if v.name in self.states and v.variable not in self.statistics]

    def _add_extra_inputs(self) -> None:
        taken = {v.name for v in self.program.main.params} | {v.variable for v in self.targets} | {SEED}
        taken |= {b.var.name for b in self.program.bindings}
        wanted: dict[str, tuple[tuple[int, ...], str]] = {
            name: ((), "float32") for name in self.optimizer.scalars
        }
        if self.spec.is_partial and self.spec.accumulate > 1:
            wanted[_SHARE] = (), "float32"
        for parameter in self.parameters:
            for suffix, kind in self._suffixes():
                name = f"{parameter.name}#{suffix}"
                self.states[name] = TrainingState(name, kind, parameter.shape, parameter.dtype)
                wanted[name] = parameter.shape, parameter.dtype
        variables = safe_names(wanted, taken)
        for name, (shape, dtype) in wanted.items():
            self.extra[name] = ValueInfo(name, variables[name], shape, dtype)

    def _suffixes(self) -> list[tuple[str, str]]:
        sums = [("sum", SUM)] if self.spec.accumulate > 1 else []
        return [*((name, MOMENT) for name in self.optimizer.states), *sums]

    # ------------------------------------------------------------------------------------- programs

    def step(self) -> ImportedModel:
        def whole(emitter: Emitter, parameter: relax.Var, gradient: relax.Expr) -> relax.Expr:
            if self.spec.accumulate == 1:
                return gradient
            name = names[parameter.name]
            total = emitter.inputs[self.extra[f"{name}#sum"].variable]
            return self._mean(emitter, name, emitter.emit(relax.op.add(total, gradient)))

        def update(emitter: Emitter, parameter: relax.Var, gradient: relax.Expr) -> list[relax.Var]:
            gradient = whole(emitter, parameter, gradient)
            return self._updated(emitter, names[parameter.name], parameter, gradient)

        names, extra = {v.variable: v.name for v in self.parameters}, list(self.extra.values())
        if self.spec.clip_norm is None:
            made = self._differentiated(extra, update, ("", *self.optimizer.states))
        else:
            made = self._differentiated(extra, lambda *given: [whole(*given)], (_GRADIENT,))
            made = self._with_updates(made)
        if self.spec.accumulate > 1:  # another program takes the GPU between two steps
            return made
        outputs = {v.name.removesuffix(NEW): i for i, v in enumerate(made.outputs)}
        states = [(i, v.name) for i, v in enumerate(made.inputs) if v.name in self.states]
        carried = tuple((i, outputs[name]) for i, name in states if name in outputs)
        return replace(made, loop_carried=carried)

    def _with_updates(self, gradients: ImportedModel) -> ImportedModel:
        """A program with all new states where one has the gradients that these follow from."""
        position = {v.name: i for i, v in enumerate(gradients.outputs)}
        found = {
            v: position[name]
            for v in self.parameters
            if (name := _state_name(v.name, _GRADIENT) + NEW) in position
        }
        copy = NetworkCopy.of(Program(gradients.module, gradients.weights, gradients.origins), ())
        copy.run(lambda c, call: None)
        outputs = copy.outputs()
        results = self._all_updated(copy.emitter, {v: outputs[i] for v, i in found.items()})
        kept = [i for i in range(len(outputs)) if i not in found.values()]
        program = copy.emitter.builder.finish([*(outputs[i] for i in kept), *results], copy.functions())
        names = [*(gradients.outputs[i].name for i in kept), *self._new_states(found)]
        return self._imported(program, names, gradients.inputs)

    def accumulation(self) -> ImportedModel:
        def add(emitter: Emitter, parameter: relax.Var, gradient: relax.Expr) -> list[relax.Var]:
            given = emitter.inputs
            return [emitter.emit(relax.op.add(given[sums[parameter.name]], gradient))]

        sums = {v.variable: self.extra[f"{v.name}#sum"].variable for v in self.parameters}
        extra = [self.extra[f"{v.name}#sum"] for v in self.parameters]
        shares = [self.share] if self.share is not None else []
        return self._differentiated([*extra, *shares], add, ("sum",))

    def update(self, accumulation: ImportedModel) -> ImportedModel:
        """A step's end alone, of the parameters that have a gradient: the others have no sum to read."""
        summed = {value.name for value in accumulation.outputs}
        parameters = [v for v in self.parameters if f"{v.name}#sum{NEW}" in summed]
        suffixes = [suffix for suffix, _ in self._suffixes()]
        extra = [self.extra[f"{v.name}#{suffix}"] for v in parameters for suffix in suffixes]
        inputs = [*parameters, *extra, *(self.extra[name] for name in self.optimizer.scalars)]
        emitter = Emitter(
            ProgramBuilder([relax.Var(v.variable, relax.TensorType(v.shape, v.dtype)) for v in inputs])
        )
        sums = {v: emitter.inputs[self.extra[f"{v.name}#sum"].variable] for v in parameters}
        means = {v: self._mean(emitter, v.name, total) for v, total in sums.items()}
        results = self._all_updated(emitter, means)
        program = emitter.builder.finish(results, dict(emitter.functions.values()))
        made = self._imported(program, self._new_states(parameters), inputs)
        return replace(made, parameters={v.name: self.model.parameters[v.name] for v in parameters})

    def _new_states(self, parameters: Iterable[ValueInfo]) -> list[str]:
        """Names of the outputs of `_all_updated`."""
        suffixes = ("", *self.optimizer.states)
        return [_state_name(v.name, suffix) + NEW for v in parameters for suffix in suffixes]

    def _mean(self, emitter: Emitter, name: str, total: relax.Var) -> relax.Var:
        """The gradient of a batch, of the sum over its parts."""
        mean = relax.op.multiply(total, constant(1.0 / self.spec.accumulate, total))
        return emitter.emit(mean, f"{name}_mean")

    def _all_updated(self, emitter: Emitter, gradients: Mapping[ValueInfo, relax.Expr]) -> list[relax.Expr]:
        """New states of all parameters that have a gradient."""
        made = list(gradients.values())
        if self.spec.clip_norm is not None:
            made = clipped(emitter, made, self.spec.clip_norm)
        results: list[relax.Expr] = []
        for value, gradient in zip(gradients, made, strict=True):
            results += self._updated(emitter, value.name, emitter.inputs[value.variable], gradient)
        return results

    def _updated(
        self, emitter: Emitter, name: str, parameter: relax.Var, gradient: relax.Expr
    ) -> list[relax.Var]:
        given = emitter.inputs
        moments = [given[self.extra[f"{name}#{suffix}"].variable] for suffix in self.optimizer.states]
        scalars = {n: given[self.extra[n].variable] for n in self.optimizer.scalars}
        return emit_update(self.optimizer, emitter, parameter, gradient, moments, scalars)

    def evaluation(self) -> ImportedModel:
        copy = NetworkCopy.of(self.program, self.targets)
        copy.run(evaluated)
        outputs = copy.outputs()[: len(self.model.outputs)]
        loss = self._emit_loss(copy, outputs)
        program = copy.emitter.builder.finish([loss, *outputs], copy.functions())
        return self._imported(program, [self.loss_name, *(v.name for v in self.model.outputs)], self.targets)

    def _differentiated(
        self, extra: Sequence[ValueInfo], update: Update, suffixes: Sequence[str]
    ) -> ImportedModel:
        """`update` gives a new value of each parameter's state with one of these suffixes."""
        copy = NetworkCopy.of(self.program, [*self.targets, *extra])
        statistics: dict[str, relax.Expr] = {}
        copy.run(lambda c, call: with_statistics(c, call, statistics))
        loss = self._emit_loss(copy, copy.outputs())
        if self.share is not None:
            share = copy.emitter.inputs[self.share.variable]
            loss = copy.emitter.emit(relax.op.multiply(loss, share), "loss")
        program = copy.emitter.builder.finish([loss, *statistics.values()], copy.functions())
        made = differentiate(
            program,
            [v.variable for v in self.parameters],
            loss=0,
            update=update,
            norm_parts=self.spec.synchronized_parts,
            examples=self.examples,
        )
        names = {v.variable: v.name for v in self.model.inputs}
        changed = [names[variable] for variable in statistics]
        for parameter in self.parameters:
            results = made.results.get(parameter.variable, ())
            changed += [_state_name(parameter.name, suffix) for suffix in suffixes[: len(results)]]
        outputs = [self.loss_name, *(name + NEW for name in changed)]
        return self._imported(made.program, outputs, [*self.targets, *extra, *_seed(made)])

    def _emit_loss(self, copy: NetworkCopy, outputs: Sequence[relax.Expr]) -> relax.Expr:
        if not self.terms:
            return outputs[0]
        given = copy.emitter.inputs
        examples = None if self.examples is None else given[self.examples]
        summands = []
        for (term, position), target in zip(self.terms, self.targets, strict=True):
            elements = _LOSSES[term.kind](copy.emitter, outputs[position], given[target.variable], term)
            value = losses.mean(copy.emitter, elements, examples)
            if term.weight != 1.0:
                value = copy.emitter.emit(relax.op.multiply(value, constant(term.weight, value)), "weighted")
            summands.append(value)
        total = summands[0]
        for summand in summands[1:]:
            total = copy.emitter.emit(relax.op.add(total, summand), "loss")
        return total

    def _imported(self, program: Program, outputs: list[str], more: Iterable[ValueInfo]) -> ImportedModel:
        """A program with the user's names, in the form of an imported model."""
        infos = {v.variable: v for v in (*self.model.inputs, *self.model.sizes, *more)}
        variables = program.inputs
        results = [
            ValueInfo(name, getattr(value, "name", name), tensor_shape(value), tensor_dtype(value))
            for name, value in zip(outputs, program.outputs, strict=True)
        ]
        return replace(
            self.model,
            module=program.module,
            weights=program.weights,
            inputs=tuple(infos[v.name] for v in variables),
            outputs=tuple(results),
            origins=program.origins,
            counts=(),
            sizes=(),
        )


def _seed(made: Differentiated) -> list[ValueInfo]:
    return [ValueInfo("#dropout", SEED, (), "int64")] if made.has_seed else []


def _state_name(parameter: str, suffix: str) -> str:
    return f"{parameter}#{suffix}" if suffix else parameter


# ----------------------------------------------------------------------------------- loss and targets

_LOSSES: Mapping[str, Callable[[Emitter, relax.Expr, relax.Expr, LossTerm], relax.Expr]] = {
    "softmax_cross_entropy": lambda emitter, output, target, term: losses.softmax_cross_entropy(
        emitter, output, target, label_smoothing=term.label_smoothing
    ),
    "mse": lambda emitter, output, target, term: losses.mse(emitter, output, target),
    "l1": lambda emitter, output, target, term: losses.l1(emitter, output, target),
    "bce_with_logits": lambda emitter, output, target, term: losses.bce_with_logits(emitter, output, target),
}


def _output_position(term: LossTerm, model: ImportedModel) -> int:
    names = [value.name for value in model.outputs]
    if term.output is None and len(names) == 1:
        return 0
    if term.output not in names:
        what = (
            "the loss does not name its output"
            if term.output is None
            else (f"the model has no output {term.output!r}")
        )
        remedy = f"write {term.kind}(OUTPUT) with one of {', '.join(names)}"
        raise UsageError("HC574", what, where=model.source.name, remedy=remedy)
    return names.index(term.output)


def _check_examples(model: ImportedModel, spec: TrainingSpec, terms: Sequence[tuple[LossTerm, int]]) -> None:
    """Of a batch that need not be whole, each summand of the loss is of one entry for each example."""
    for _, position in terms if spec.has_padding else ():
        output = model.outputs[position]
        if [axis for axis, _ in output.cuts] != [0]:
            what = f"output {output.name!r} has not one entry for each example"
            remedy = "name another output, or train on whole batches alone: give --batch one number"
            raise UsageError("HC574", what, where=model.source.name, remedy=remedy)


def _targets(terms: Sequence[tuple[LossTerm, int]], model: ImportedModel) -> tuple[ValueInfo, ...]:
    """An input for each summand: classes for softmax cross entropy, else of the output's own type."""
    if not terms:
        _check_own_loss(model)
    wanted = ["target" if len(terms) == 1 else f"target_{term.output}" for term, _ in terms]
    names = unique_names([*(v.name for v in model.inputs), *wanted])[len(model.inputs) :]
    program = Program(model.module, model.weights, model.origins)
    taken = {v.name for v in program.main.params} | {b.var.name for b in program.bindings}
    variables = safe_names(names, taken)
    targets = []
    for name, (term, position) in zip(names, terms, strict=True):
        shape, dtype = model.outputs[position].shape, model.outputs[position].dtype
        labels: tuple[Labels, ...] = ()
        if term.kind == "softmax_cross_entropy":
            if len(shape) < 2:
                what = f"softmax_cross_entropy needs an output [N, C, ...], and its shape is {list(shape)}"
                raise UsageError("HC574", what, where=model.source.name, remedy="name another output or loss")
            labels = (Labels(classes=shape[1]),)
            shape, dtype = (shape[0], *shape[2:]), "int64"
        targets.append(ValueInfo(name, variables[name], shape, dtype, labels))
    return tuple(targets)


def _check_own_loss(model: ImportedModel) -> None:
    first = model.outputs[0]
    if math.prod(first.shape) != 1:
        what = f"the model's first output {first.name!r} is no loss: its shape is {list(first.shape)}"
        raise UsageError("HC574", what, where=model.source.name, remedy="give --loss, such as --loss mse")
