"""What a step asks of each resource, and the runner that takes resources through steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._arrays import StreamLike, stream_handle
from ._module import core
from ._records import Bucket


class KvStream(NamedTuple):
    """One cache stream: a request may have several, told apart by their label."""

    request: int
    label: str = "main"


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

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def forks(self, forks: Sequence[Fork]) -> list[int]:
        flat = []
        for source, target in forks:
            flat += [source.request, self(source.label), target.request, self(target.label)]
        return flat


class Step:
    """One step of an engine: for each resource, by its key, what it is asked to do.

    Step({"kv": KvStep(segments=[Segment(7, span=1)]), "attention": AttentionStep()})

    Immutable: a step that was admitted early is recognised by its content.
    """

    def __init__(self, parts: Mapping[str, KvStep | AttentionStep]) -> None:
        self._box = core.step_make()
        for key, part in parts.items():
            if isinstance(part, KvStep):
                self._add_kv(key, part)
            else:
                self._add_attention(key, part)

    def _add_kv(self, key: str, part: KvStep) -> None:
        number = _Names()
        requests = np.array([segment.request for segment in part.segments], np.int64)
        labels = np.array([number(segment.label) for segment in part.segments], np.int32)
        spans = np.array([segment.span for segment in part.segments], np.int32)
        before, after = number.forks(part.forks_before), number.forks(part.forks_after)
        combined: list[int] = []
        for name, members in (part.combined or {}).items():
            combined += [number(name), len(members), *map(number, members)]
        planned = [number(label) for label in part.labels]
        names = list(number.numbers)
        core.step_add_kv(
            self._box, key, names, requests, labels, spans, before, after, combined, planned
        )

    def _add_attention(self, key: str, part: AttentionStep) -> None:
        number = _Names()
        passes: list[int] = []
        for one in part.passes:
            passes += [one.causal, one.context_only, len(one.segments)]
            for queries, label, appended in one.segments:
                passes += [number(label), queries, -1 if appended is None else appended]
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


class StepRunner:
    """Drives resources through the steps of an engine, in the order of their dependencies.

    A step goes admit, plan, commit; or abandon after either of the first two. The next one may be
    admitted and planned early, by pre_admit and pre_plan, while it runs; the next admit and plan of
    the same step for the same lease then find the work done. Calls in another order raise
    RuntimeError, wrong arguments ValueError. docs/engine.md has the whole life of a step, and which
    calls may overlap.

    resources  KvResource and AttentionResource objects, of distinct keys
    """

    def __init__(self, resources: Sequence[Any]) -> None:
        self._device = resources[0]._device if resources else (0, 0)
        self._box = core.runner_make([resource._box for resource in resources])

    def admit(self, step: Step) -> AdmitResult:
        """Reserves what the step needs in every resource; a refusal changes nothing."""
        return admit_result(core.runner_admit(self._box, step._box))

    def plan(
        self, step: Step, lease: SlotLease | None = None, *, stream: StreamLike = None
    ) -> None:
        """Plans the admitted step, the same that admit got; where it raises, it is abandoned."""
        core.runner_plan(self._box, step._box, *self._lease(lease), self._stream(stream))

    def pre_admit(self, step: Step) -> AdmitResult:
        """Reserves the next step on top of the one in flight."""
        return admit_result(core.runner_pre_admit(self._box, step._box))

    def pre_plan(self, step: Step, lease: SlotLease, *, stream: StreamLike = None) -> None:
        """Plans the pre-admitted step into another slot; the plan in use stays as it is."""
        core.runner_pre_plan(self._box, step._box, *self._lease(lease), self._stream(stream))

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
        flat = [number for bucket, pages in shapes for number in (*bucket._fields(), pages)]
        core.runner_size_graph_buffers(self._box, flat)

    def _stream(self, stream: StreamLike) -> int:
        return stream_handle(self._device, stream)

    @staticmethod
    def _lease(lease: SlotLease | None) -> tuple[Any, ...]:
        lease = lease or SlotLease()
        if lease.bucket is None:
            return (lease.slot, None, 0, 0)
        return (lease.slot, lease.walk, *lease.bucket._fields())
