"""Run a function, drop what autograd saved inside it, and run it again in backward.

Never reentrant: built on torch.utils.checkpoint(use_reentrant=False), which rebuilds saved tensors on demand
and so supports double backward, retain_graph, nesting and any input or output. Added here: random state is
restored only if the region drew from it; running statistics are counted once; inputs may be nested, written
in place by a module, or kept on the host; and a recomputation that does not match says which region, what
differed and why that usually happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from remat._torch_private import StopRecomputation, active_saved_tensors_hooks, flatten, in_functorch
from remat.errors import InputError, RecomputeError
from remat.run.content import Content, Noise
from remat.run.inputs import Inputs, Leaving
from remat.run.meter import SavedBytes
from remat.run.rng import RandomState, SameChance, restored
from remat.run.state import ModuleState, modules_of, norms_behind, untouched_statistics

__all__ = [
    "Observer",
    "Options",
    "checkpoint",
    "checkpoint_fn",
    "checkpoint_sequential",
    "gradient_checkpoint_forward",
    "needs_gradients",
    "run_checkpointed",
]

_CAUSES = """Usual causes:
  - a KV cache that grows with every call: pass use_cache=False (past_key_values=None) while training;
  - MoE routing or other data-dependent branches that flip on recomputation: leave that module out
    (exclude=...), or make the branch deterministic;
  - an in-place write, or a change of .training, autocast or a global, between forward and backward."""


class Observer(Protocol):
    """Told what a region does while it runs."""

    def entered(self) -> None:
        """A call is being checkpointed."""

    def counting(self) -> bool:
        """Whether this call's saved bytes should be counted (it costs a little)."""

    def counted(self, before: int, after: int) -> None: ...

    def recomputed(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """How a region is checkpointed. `name` is what errors call it."""

    offload: bool = False
    name: str = ""
    preserve_rng_state: bool = True
    early_stop: bool = True
    determinism_check: str = "default"
    check: bool = True  # compare a few elements of what is computed again (run.content)


# --------------------------------------------------------------------------------------------- public


def checkpoint(fn: Callable[..., Any], *args: Any, offload: bool = False, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, with what autograd saves inside recomputed in backward.

    Arguments and results may be any nest of lists, tuples and dicts. `offload` keeps the tensor arguments on
    the host in between, moved behind compute. Untouched when no gradient is being recorded or nothing needs
    one.
    """
    return _call(fn, args, kwargs, Options(offload=offload))


def checkpoint_fn(**options: Any) -> Callable[..., Any]:
    """A checkpoint function with its options fixed: `f(fn, *args, **kwargs)`, every keyword goes to `fn`.

    Options: offload, name, preserve_rng_state, early_stop, determinism_check, check. It fits where a library
    takes such a function (transformers' and diffusers' `_gradient_checkpointing_func`).
    """
    if options.pop("use_reentrant", False):
        raise InputError("use_reentrant=True: remat never checkpoints reentrantly; leave the option out")
    known = [field.name for field in fields(Options)]
    for option in options:
        if option not in known:
            raise InputError(f"checkpoint_fn has no option {option!r}; it has {', '.join(known)}")
    fixed = Options(**options)

    def configured(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("use_reentrant", None)  # libraries pass it along; it never applies here
        return _call(fn, args, kwargs, fixed)

    return configured


def checkpoint_sequential(
    functions: Sequence[Callable[..., Any]] | nn.Sequential, segments: int, input: Any
) -> Any:
    """Run functions one after the other in `segments` checkpointed pieces of nearly equal length.

    As in torch the last piece runs plainly: its activations are needed first, so dropping them frees nothing
    that backward would not ask for at once. In a list of functions a tuple is passed on as several arguments;
    an nn.Sequential passes whatever it gets as one.
    """
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise InputError(f"segments={segments!r}; say how many pieces, an int of at least 1")
    chain = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    if not chain:
        raise InputError("functions is empty; pass an nn.Sequential or a list with at least one callable")
    for position, function in enumerate(chain):
        if not callable(function):
            raise InputError(f"functions[{position}] is a {type(function).__name__}, not a callable")
    spread = not isinstance(functions, nn.Sequential)
    pieces = _split(chain, min(segments, len(chain)))
    for number, piece in enumerate(pieces):
        run = _Piece(piece, spread)
        if number == len(pieces) - 1:
            return run(input)
        name = f"checkpoint_sequential piece {number + 1} of {len(pieces)}"
        input = run_checkpointed(run, (input,), {}, Options(name=name), run.modules)
    raise AssertionError("unreachable: there is at least one piece")


def gradient_checkpoint_forward(
    model: Callable[..., Any],
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """DiffSynth's function: plain, checkpointed, or checkpointed with the inputs kept on the host."""
    if not callable(model):
        raise InputError(
            f"model is a {type(model).__name__}, not a callable; pass the block or function to run"
        )
    if use_gradient_checkpointing_offload:
        return _call(model, args, kwargs, Options(offload=True))
    if use_gradient_checkpointing:
        return _call(model, args, kwargs, Options())
    return model(*args, **kwargs)


# --------------------------------------------------------------------------------------------- one call


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    if not callable(fn):
        raise InputError(
            f"fn is a {type(fn).__name__}, not a callable; write checkpoint(f, x), not checkpoint(f(x))"
        )
    return run_checkpointed(fn, args, kwargs, options, modules_of(fn))


def needs_gradients(tensors: Iterable[Any], modules: Sequence[nn.Module]) -> bool:
    """Whether anything that goes into a region requires a gradient."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tensors):
        return True
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())


def run_checkpointed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    modules: tuple[nn.Module, ...] = (),
    observer: Observer | None = None,
    leaving: Leaving | None = None,
) -> Any:
    """Checkpoint one call. `modules`: those that `fn` runs, if known; their state is followed then.
    `leaving`: the inputs that wait on the host, where neither all of them do (`options.offload`) nor none."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_functorch():
        return fn(*args, **kwargs)
    leaves, build = flatten((args, kwargs))
    if modules and not needs_gradients(leaves, modules):
        return fn(*args, **kwargs)
    call = _Call(fn, args, kwargs, Inputs(leaves, build, modules), options, modules, observer, leaving)
    hints = [torch.empty(0, device=d) for d in call.devices if d.type != "cuda"][:1]  # autocast's device
    output = torch_checkpoint(
        call,
        *hints,
        use_reentrant=False,
        preserve_rng_state=False,
        determinism_check=options.determinism_check,
        early_stop=options.early_stop,
    )
    call.settle()
    return output


class _Call:
    """One call of a region: run first by forward, then again by backward. It lives as long as the graph."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Inputs,
        options: Options,
        modules: tuple[nn.Module, ...],
        observer: Observer | None,
        leaving: Leaving | None,
    ) -> None:
        self._fn = fn
        self._leaving = leaving
        self._run = SameChance(fn)
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._inputs = inputs
        self._options = options
        self._modules = modules
        self._observer = observer
        if observer is not None:
            observer.entered()
        self._saved = SavedBytes(modules) if observer is not None and observer.counting() else None
        self._content = _content(options, modules, self.name)
        self.devices = _accelerators(inputs.tensors(), modules)
        self._state = [ModuleState(module) for module in modules]
        self._entry = RandomState(self.devices) if options.preserve_rng_state else None
        self._exit: RandomState | None = None
        self._settled = False

    @property
    def name(self) -> str:
        return self._options.name or getattr(self._fn, "__qualname__", type(self._fn).__name__)

    def __call__(self, *_: Any) -> Any:
        if self._first is None:
            return self._run_again()
        (args, kwargs), self._first = self._first, None
        return self._run_first(args, kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pack, unpack = _hooks()
        saved, content, name = self._saved, self._content, self.name

        def noted_pack(tensor: Tensor) -> Any:
            if saved is not None:
                saved.add(tensor)
            if content is not None:
                content.note(tensor)
            return pack(tensor)

        def checked_unpack(packed: Any) -> Any:
            try:
                return unpack(packed)
            except CheckpointError as error:
                raise _mismatch(name, error) from None

        plainly = saved is None and content is None
        with saved_tensors_hooks(pack if plainly else noted_pack, checked_unpack):
            return self._run(*args, **kwargs)

    def settle(self) -> None:
        """Forward is over: keep only what a recomputation needs."""
        if self._entry is not None:
            end = self._entry.now()
            drew = end != self._entry
            self._entry, self._exit = (self._entry, end) if drew else (None, None)
        if self._content is not None:
            self._content.settle()
        held = self._inputs.settle(self.name, offload=self._leaving or self._options.offload)
        self._leaving = None  # it holds the tensors
        for state in self._state:
            state.settle(self.name)
        if self._saved is not None and self._observer is not None:
            kept = SavedBytes(self._modules)
            kept.add_all(held)
            self._observer.counted(self._saved.nbytes, kept.nbytes + sum(s.nbytes for s in self._state))
            self._saved = None
        self._settled = True

    def _run_again(self) -> None:
        if self._observer is not None:
            self._observer.recomputed()
        for state in self._state:
            state.check(self.name)
        args, kwargs = self._inputs.again(self.name)
        with ExitStack() as stack:
            stack.enter_context(restored(self._entry))
            for state in self._state:
                stack.enter_context(state.as_at_entry())
            if not self._modules:
                stack.enter_context(untouched_statistics(lambda: norms_behind(self._fn, args)))
            finish = _RunOn(self._exit, self._content)
            stack.enter_context(finish.hooks())
            try:
                self._run(*args, **kwargs)
                finish.end()
            except CheckpointError as error:
                raise _mismatch(self.name, error) from None
            except StopRecomputation:
                finish.end()
                raise
            except RecomputeError:
                raise
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(
                        f"remat: raised while recomputing {self.name} in backward; forward had passed"
                    )
                raise
        if finish.stopped:
            raise StopRecomputation


class _RunOn:
    """Compares what is saved again with `content`, and puts off torch's early stop until the region has drawn
    all the random numbers that forward drew, where it `end`ed.

    torch stops as soon as the last tensor is saved. An operation that fills a saved tensor itself (RReLU
    saves its noise before the kernel draws it, pytorch/pytorch#193671) would then never run, and backward
    would read uninitialised memory.
    """

    def __init__(self, end: RandomState | None, content: Content | None) -> None:
        self._end, self._content = end, content
        self.stopped = False
        if content is not None:
            content.begin_again()

    def end(self) -> None:
        if self._content is not None:
            self._content.end_again()

    def hooks(self) -> AbstractContextManager[Any]:
        if self._end is None and self._content is None:
            return nullcontext()
        pack, unpack = _hooks()
        end, content = self._end, self._content

        def pack_and_run_on(tensor: Tensor) -> Any:
            if self.stopped:
                raise CheckpointError("more tensors were saved during recomputation than during forward")
            if content is not None:
                content.compare(tensor)
            try:
                return pack(tensor)
            except StopRecomputation:
                if end is None or end.now() == end:
                    raise
                self.stopped = True
                return tensor

        return saved_tensors_hooks(pack_and_run_on, unpack)


_NOISE: WeakKeyDictionary[nn.Module, Noise] = WeakKeyDictionary()


def _content(options: Options, modules: Sequence[nn.Module], name: str) -> Content | None:
    """What is computed again is compared, unless other random numbers are drawn, or other bits are usual."""
    if not options.check or not options.preserve_rng_state:
        return None
    noise = _NOISE.setdefault(modules[0], Noise()) if modules else Noise()
    return None if noise.is_usual else Content(name, noise)


def _hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    hooks = active_saved_tensors_hooks()
    assert hooks is not None, "torch.utils.checkpoint runs its function under saved-tensor hooks"
    return hooks


def _mismatch(name: str, error: CheckpointError) -> RecomputeError:
    differed = str(error).split("\nTip:")[0].replace("torch.utils.checkpoint: ", "").strip()
    return RecomputeError(
        f"{name}: recomputation in backward did not give what forward had saved; the gradients of this step "
        f"must not be used.\nWhat differed: {differed}\n{_CAUSES}",
        region=name,
    )


def _accelerators(tensors: Iterable[Tensor], modules: Sequence[nn.Module]) -> tuple[torch.device, ...]:
    found = {tensor.device for tensor in tensors}
    found.update(p.device for module in modules for p in module.parameters())
    return tuple(sorted((d for d in found if d.type not in ("cpu", "meta")), key=str))


# --------------------------------------------------------------------------------------------- pieces


@dataclass(frozen=True)
class _Piece:
    """Some functions in a row, as one callable."""

    functions: tuple[Callable[..., Any], ...]
    spread: bool

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        found = [modules_of(function) for function in self.functions]
        return tuple(module for modules in found for module in modules) if all(found) else ()

    def __call__(self, value: Any) -> Any:
        for function in self.functions:
            value = function(*value) if self.spread and isinstance(value, tuple) else function(value)
        return value


def _split(chain: list[Any], segments: int) -> list[tuple[Any, ...]]:
    """Pieces whose lengths differ by one at most."""
    bounds = [len(chain) * i // segments for i in range(segments + 1)]
    return [tuple(chain[a:b]) for a, b in pairwise(bounds)]
