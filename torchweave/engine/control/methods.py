"""Methods of an engine that are control calls, and the result of a call for the thread that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from torchweave.engine.control.errors import ControlError
from torchweave.engine.lora_request import LoRARequest, requests_of

if TYPE_CHECKING:
    from torchweave.config.plan import Plan

Value = TypeVar("Value")
_POLL_SECONDS = 1.0  # between checks that the engine is alive


class LoopState(Protocol):
    """The loop that runs calls, as a batch manager shows it."""

    @property
    def alive(self) -> bool: ...
    @property
    def end_reason(self) -> str: ...


class ControlMethods:
    """Control calls as methods; see docs/develop/control-calls.md."""

    plan: Plan

    def call(self, name: str, **arguments: Any) -> Any:
        """Run a control call; returns its result."""
        raise NotImplementedError

    def pause(self, mode: Literal["wait", "abort", "keep"] = "abort", clear_cache: bool = True) -> None:
        """Start no new request until `resume`: those of later calls wait.

        Args:
            mode: what happens to the requests that run. wait: they finish before this method returns. abort: they and those that
                wait end with the finish reason `abort`. keep: they stay where they are, and continue after `resume` with the tokens
                that they would have had.
            clear_cache: forget the prefix cache, except with keep, whose requests use it.

        Raises:
            ValueError: an argument is not known.
            ControlError: another call of `pause` or `resume` came before the running requests had finished.
            RuntimeError: the engine failed or was shut down.
        """
        self.call("pause", mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Continue after `pause`; without one, nothing changes."""
        self.call("resume")

    def is_paused(self) -> bool:
        """Whether new requests wait, from the beginning of `pause` on."""
        return self.call("is_paused")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the KV cache of earlier requests; returns False, and changes nothing, while requests run.

        Args:
            reset_running_requests: the running requests forget theirs too, and compute it again from their tokens.

        Raises:
            RuntimeError: the engine failed or was shut down.
        """
        return self.call("reset_prefix_cache", reset_running_requests=reset_running_requests)

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> None:
        """Load a low-rank adapter that PEFT has saved; steps run while its files are read.

        Args:
            load_inplace: an adapter of this name may be loaded already: later requests have the new one, earlier ones keep theirs.

        Raises:
            ValueError: the name is taken, or the adapter is damaged or not supported.
            ControlError: the engine was started without `enable_lora`.
        """
        self.call("load_adapter", **adapter_arguments(self.plan, lora_name, lora_path, load_inplace))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Take an adapter from later requests; those that have it end with it.

        Raises:
            ValueError: there is no such adapter.
            ControlError: the engine was started without `enable_lora`.
        """
        self.call("unload_adapter", adapter=lora_name)

    def list_lora_adapters(self) -> dict[str, str]:
        """The folders of the loaded adapters, by name."""
        return self.call("list_adapters")

    def load_requested(self, requests: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[str]:
        """Load the adapters of `count` prompts that are not loaded; returns their names, empty for none.

        Raises:
            ValueError: an adapter cannot be loaded, one of its name is loaded from another folder, or there are not `count`.
        """
        each_request = requests_of(requests, count)
        distinct = {request.lora_name: request for request in each_request if request is not None}
        loaded = self.list_lora_adapters() if distinct else {}
        for name, request in distinct.items():
            if name not in loaded:
                self.load_lora_adapter(name, request.lora_path)
            elif loaded[name] != request.lora_path:
                raise ValueError(
                    f"The adapter {name!r} is loaded from {loaded[name]}, not from {request.lora_path}; use another name, or call "
                    "load_lora_adapter with load_inplace=True first."
                )
        return ["" if request is None else request.lora_name for request in each_request]

    def apply_model(self, function: Callable[[Any], Value]) -> list[Value]:
        """Call `function` with transformers' module on every rank, between two steps; returns the results by rank.

        Of several ranks, the others import the function by its name, so that it stands at the top of a module.

        Raises:
            ValueError: the function cannot be sent to the other ranks.
            ControlError: it failed on a rank.
        """
        return self.call("apply_model", function=function)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `method(rank, *args, **kwargs)` on every rank, or the control call of a name; returns the results by rank.

        Args:
            timeout: has no effect: a rank without heartbeats ends the engine.

        Raises:
            ValueError: there is no such call, or it takes other arguments.
            ControlError: it failed on a rank.
        """
        if not isinstance(method, str):
            return self.call("collective_rpc", method=method, arguments=tuple(args), options=dict(kwargs or {}))
        if args:
            raise ValueError(f"The control call {method} takes its arguments by name; give them in kwargs.")
        result = self.call(method, **(kwargs or {}))
        return result if isinstance(result, list) else [result]

    def start_profile(self, num_steps: int | None = None) -> None:
        """Record what every rank runs, until `stop_profile` or for `num_steps` steps.

        Raises:
            ValueError: the engine has no `profile_dir`, or `num_steps` is invalid.
            ControlError: a profile runs already, or a rank cannot write to the folder.
        """
        self.call("start_profile", folder=self.plan.config.profile_dir, num_steps=num_steps)

    def stop_profile(self) -> list[str]:
        """End the profile; returns the file of each rank's trace, in the format of Chrome and Perfetto.

        Raises:
            ControlError: no profile was started, or a rank cannot write its trace.
        """
        return self.call("stop_profile")


def adapter_arguments(plan: Plan, name: str, path: str, replace: bool) -> dict[str, Any]:
    """Arguments of the control call `load_adapter`."""
    return {"adapter": name, "path": str(path), "max_rank": plan.config.max_lora_rank, "replace": replace}


def result_of(loop: LoopState, future: Future[Value]) -> Value:
    """Wait for the result of a call.

    Raises:
        ValueError: the call's name or arguments are invalid.
        ControlError: the call failed.
        RuntimeError: the engine failed or was shut down.
    """
    while True:
        try:
            return future.result(_POLL_SECONDS)
        except TimeoutError:
            if future.done():  # the call's own error
                raise
            if not loop.alive:
                raise RuntimeError(f"The engine has ended: {loop.end_reason}") from None
        except ControlError as error:
            raise as_user_error(error) from None


def as_user_error(error: RuntimeError) -> Exception:
    """The error of a call for its caller: a `ValueError` if the call's name or arguments are invalid."""
    return ValueError(str(error)) if isinstance(error, ControlError) and error.kind == "invalid" else error
