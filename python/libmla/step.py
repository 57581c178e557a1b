"""What a step asks of each resource, and the runner that takes resources through steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._arrays import StreamLike, int_array, stream_handle
from ._checks import entries, instance, integer, invalid, pair, shown, text
from ._module import Handle, core
from ._records import Bucket

_KV, _ATTENTION, _RUNNER = "KvStep", "AttentionStep", "StepRunner"
_LARGEST = 2**63 - 1


class KvStream(NamedTuple):
    """One cache stream: a request may have several, told apart by their label."""

    request: int
    label: str = "main"


def request_of(request: Any, what: str, where: str) -> int:
    """A request's number."""
    return integer(request, what, where, 0, _LARGEST, "an integer, 0 to 2^63 - 1")


class Segment(NamedTuple):
    """What a step does to one stream: `span` rows are appended; 0 reads without extending."""

    request: int
    span: int
    label: str = "main"


class Fork(NamedTuple):
    """Makes `target`, which must not be open, a stream with the content of `source`."""

    source: KvStream
    target: KvStream


@dataclass(frozen=True, kw_only=True)
class KvStep:
    """What a step does to the KV streams, in the order of its rows."""

    segments: Sequence[Segment] = ()
    forks_before: Sequence[Fork] = ()
    """Made in this order before the segments, whose streams their targets may be."""
    forks_after: Sequence[Fork] = ()
    """Made in this order at commit, of streams as the step leaves them."""
    combined: Mapping[str, Sequence[str]] | None = None
    """Labels that are packed as one plan, by the name of that; others have plans of their own."""
    labels: Sequence[str] = ()
    """Labels that are planned even where no segment names them, for graphs that replay them."""


class QuerySegment(NamedTuple):
    """Query rows of one stream in one pass; the i-th of a label is that of the label's i-th row."""

    num_queries: int
    label: str = "main"
    num_appended: int | None = None
    """How many of the rows that the step appends are seen, the first ones; None: all."""


@dataclass(frozen=True, kw_only=True)
class AttentionPass:
    """One attention over the step's streams."""

    causal: bool = True
    context_only: bool = False
    """The queries see what was stored before the step, all of it, and no row that it appends."""
    segments: Sequence[QuerySegment] = ()
    """Query counts; empty: of every label, as many as the step appends rows."""


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """What a step asks of the attention: one pass, or several over the same streams."""

    passes: Sequence[AttentionPass] = (AttentionPass(),)


class _Names:
    """Labels by number, as the module takes them."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.numbers: dict[str, int] = {}

    def __call__(self, name: Any, what: str) -> int:
        return self.numbers.setdefault(text(name, what, self.where), len(self.numbers))

    def all(self, names: Any, what: str) -> list[int]:
        listed = entries(names, what, self.where)
        return [self(name, f"{what}[{i}]") for i, name in enumerate(listed)]

    def forks(self, forks: Any, what: str) -> list[int]:
        flat: list[int] = []
        for i, fork in enumerate(entries(forks, what, self.where)):
            instance(fork, Fork, f"{what}[{i}]", self.where)
            for end, stream in (("source", fork.source), ("target", fork.target)):
                name = f"{what}[{i}].{end}"
                request, label = instance(stream, KvStream, name, self.where)
                flat += [request_of(request, f"{name}.request", self.where)]
                flat += [self(label, f"{name}.label")]
        return flat


class Step(Handle):
    """One step of an engine: for each resource, by its key, what it is asked to do.

    Step({"kv": KvStep(segments=[Segment(7, span=1)]), "attention": AttentionStep()})

    Immutable: a step that was admitted early is recognised by its content.
    """

    def __init__(self, parts: Mapping[str, KvStep | AttentionStep]) -> None:
        self._box = core.step_make()
        for key, part in instance(parts, Mapping, "parts", "Step").items():
            text(key, "key", "Step")
            if isinstance(part, KvStep):
                self._add_kv(key, part)
            elif isinstance(part, AttentionStep):
                self._add_attention(key, part)
            else:
                raise invalid(f"parts[{key!r}]", "Step", "KvStep or AttentionStep", shown(part))

    def _add_kv(self, key: str, part: KvStep) -> None:
        number = _Names(_KV)
        segments = entries(part.segments, "segments", _KV)
        for i, segment in enumerate(segments):
            instance(segment, Segment, f"segments[{i}]", _KV)
            number(segment.label, f"segments[{i}].label")
        requests = int_array((s.request for s in segments), "segments[].request", _KV, np.int64)
        labels = np.array([number.numbers[s.label] for s in segments], np.int32)
        spans = int_array((s.span for s in segments), "segments[].span", _KV)
        for negative in np.flatnonzero(requests < 0):
            request_of(requests[negative], f"segments[{negative}].request", _KV)
        before = number.forks(part.forks_before, "forks_before")
        after = number.forks(part.forks_after, "forks_after")
        combined: list[int] = []
        groups = {} if part.combined is None else part.combined
        for name, members in instance(groups, Mapping, "combined", _KV).items():
            listed = number.all(members, f"combined[{name!r}]")
            combined += [number(name, "combined"), len(listed), *listed]
        planned = number.all(part.labels, "labels")
        names = list(number.numbers)
        core.step_add_kv(
            self._box, key, names, requests, labels, spans, before, after, combined, planned
        )

    def _add_attention(self, key: str, part: AttentionStep) -> None:
        number = _Names(_ATTENTION)
        passes: list[int] = []
        for i, one in enumerate(entries(part.passes, "passes", _ATTENTION)):
            instance(one, AttentionPass, f"passes[{i}]", _ATTENTION)
            segments = entries(one.segments, f"passes[{i}].segments", _ATTENTION)
            passes += [bool(one.causal), bool(one.context_only), len(segments)]
            for j, segment in enumerate(segments):
                name = f"passes[{i}].segments[{j}]"
                queries, label, appended = instance(segment, QuerySegment, name, _ATTENTION)
                passes += [
                    number(label, f"{name}.label"),
                    integer(queries, f"{name}.num_queries", _ATTENTION),
                    -1
                    if appended is None
                    else integer(appended, f"{name}.num_appended", _ATTENTION, 0),
                ]
        core.step_add_attention(self._box, key, list(number.numbers), list(map(int, passes)))


class Shortage(NamedTuple):
    """How many pages one segment lacks."""

    request: int
    label: str
    pages: int


@dataclass(frozen=True)
class AdmitResult:
    """The answer of admit; true where the step was admitted."""

    pages_short: int
    shortages: tuple[Shortage, ...]

    def __bool__(self) -> bool:
        return self.pages_short == 0


def admit_result(answer: Any) -> AdmitResult:
    """The module's answer as a record."""
    pages_short, *parts = answer
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return AdmitResult(pages_short, tuple(Shortage(*row) for row in rows))


@dataclass(frozen=True, kw_only=True)
class SlotLease:
    """Where a step is planned into: a copy of all that a plan writes, and the graph's bucket."""

    slot: int = 0
    walk: str = ""
    """The engine's name for the path through its model; of the bucket."""
    bucket: Bucket | None = None
    """None: the step runs eagerly."""

    def __post_init__(self) -> None:
        integer(self.slot, "slot", "SlotLease")
        text(self.walk, "walk", "SlotLease")
        if self.bucket is not None:
            instance(self.bucket, Bucket, "bucket", "SlotLease")


class StepRunner(Handle):
    """Drives resources through the steps of an engine, in the order of their dependencies.

    A step goes admit, plan, commit; or abandon after either of the first two. The next one may be
    admitted and planned early, by pre_admit and pre_plan, while it runs; the next admit and plan of
    the same step for the same lease then find the work done. Calls in another order raise
    RuntimeError, wrong arguments ValueError. docs/engine.md has the whole life of a step, and which
    calls may overlap.

    resources  KvResource and AttentionResource objects, of distinct keys
    """

    def __init__(self, resources: Sequence[Any]) -> None:
        listed = entries(resources, "resources", _RUNNER)
        for i, resource in enumerate(listed):
            if not isinstance(resource, Handle):
                expected = "a KvResource or an AttentionResource"
                raise invalid(f"resources[{i}]", _RUNNER, expected, shown(resource))
        self._box = core.runner_make([resource._box for resource in listed])
        self._device = listed[0]._device if listed else (0, 0)

    def admit(self, step: Step) -> AdmitResult:
        """Reserves what the step needs in every resource; a refusal changes nothing."""
        return admit_result(core.runner_admit(self._box, _box(step, "admit")))

    def plan(
        self, step: Step, lease: SlotLease | None = None, *, stream: StreamLike = None
    ) -> None:
        """Plans the admitted step, the same that admit got; where it raises, it is abandoned."""
        core.runner_plan(
            self._box, _box(step, "plan"), *_lease(lease, "plan"), self._stream(stream)
        )

    def pre_admit(self, step: Step) -> AdmitResult:
        """Reserves the next step on top of the one in flight."""
        return admit_result(core.runner_pre_admit(self._box, _box(step, "pre_admit")))

    def pre_plan(self, step: Step, lease: SlotLease, *, stream: StreamLike = None) -> None:
        """Plans the pre-admitted step into another slot; the plan in use stays as it is."""
        core.runner_pre_plan(
            self._box, _box(step, "pre_plan"), *_lease(lease, "pre_plan"), self._stream(stream)
        )

    def commit(self) -> None:
        """Ends the planned step; it is in every resource."""
        core.runner_commit(self._box)

    def abandon(self) -> None:
        """Ends the admitted or planned step without it, and drops a step planned early."""
        core.runner_abandon(self._box)

    def clear_preplan(self) -> None:
        """Drops the step that was admitted or planned early, if any."""
        core.runner_clear_preplan(self._box)

    def order_replay(self, stream: StreamLike = None) -> None:
        """To be called before each replay of a graph that captured a step, on the replay's stream.

        Not needed where plans and replays are on one stream.
        """
        core.runner_order_replay(self._box, self._stream(stream))

    def size_graph_buffers(self, shapes: Sequence[tuple[Bucket, int]]) -> None:
        """Sizes the buffers of captured steps, once, before the first capture.

        shapes  each bucket with the page ids that one label's plan under it may list
        """
        where = f"{_RUNNER}::size_graph_buffers"
        flat: list[int] = []
        for i, shape in enumerate(entries(shapes, "shapes", where)):
            bucket, pages = pair(shape, f"shapes[{i}]", where, "a Bucket and its pages")
            flat += instance(bucket, Bucket, f"shapes[{i}]", where)._fields()
            flat += [integer(pages, f"shapes[{i}]", where)]
        core.runner_size_graph_buffers(self._box, flat)

    def _stream(self, stream: StreamLike) -> int:
        return stream_handle(self._device, stream)


def _box(step: Step, call: str) -> Any:
    return instance(step, Step, "step", f"{_RUNNER}::{call}")._box


def _lease(lease: SlotLease | None, call: str) -> tuple[Any, ...]:
    """What the module takes for a lease."""
    if lease is None:
        lease = SlotLease()
    lease = instance(lease, SlotLease, "lease", f"{_RUNNER}::{call}")
    if lease.bucket is None:
        return (lease.slot, None, 0, 0)
    return (lease.slot, lease.walk, *lease.bucket._fields())
