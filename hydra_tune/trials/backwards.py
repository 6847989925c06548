"""The backwards that reach a trial. PyTorch's engine runs them; a trial hears of one from the first of its blocks.

    loss.backward() --> engine.run_backward                     blocks/engine.py: a Backward is under way in this thread
       Promote, or a saved weight, of the first block --> enter    the trial takes part; a step is under way
       ...of each block --> visit, then SentGradients.send         weights on the device; gradients go to the host
    engine.run_backward ends --> end                            gradients have arrived; the step may be over

A backward may run within a forward, or within another backward: checkpoints do that.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hydra_tune.blocks.ambient_settings import TorchSettings
from hydra_tune.blocks.call import Call
from hydra_tune.blocks.device_copy import DeviceCopy
from hydra_tune.blocks.engine import Backward, ForwardPass, here
from hydra_tune.errors import PrepareError
from hydra_tune.planning.planner import Planner
from hydra_tune.schedule.plan import Direction
from hydra_tune.trials.sent_gradients import SentGradients
from hydra_tune.trials.steps import Steps
from hydra_tune.trials.tasks import Visits

if TYPE_CHECKING:
    from hydra_tune.trials.trial import Trial


class Backwards:
    """The backwards of one trial. `under_way` are those that have reached it, the innermost last."""

    def __init__(
        self, trial: Trial, *, planner: Planner, steps: Steps, visits: Visits, gradients: SentGradients
    ) -> None:
        self._trial = weakref.ref(trial)
        self._planner = planner
        self._steps = steps
        self._visits = visits
        self._gradients = gradients
        self.under_way: list[Backward] = []
        self.kernel_choices = TorchSettings.now().choices  # at the begin of the last backward, or in `prepare`
        self._visited_calls: list[weakref.ref[Call]] = []  # calls that the backward under way has visited

    @property
    def trial(self) -> Trial:
        """Alive for as long as one of these methods runs: a call or the engine refers to it."""
        trial = self._trial()
        assert trial is not None
        return trial

    def visit(self, call: Call) -> DeviceCopy:
        """Begin the backward of this call's block, unless it is under way. Returns the block's copy on the device."""
        trial = call.trial
        open_backward = trial.tasks.backward
        copy = open_backward.copy_of(call)
        if copy is None:
            self.enter(call.forward_pass)
            open_backward.end()
            trial.meter.outside_ends()
            copy = self._visits.promoted_copy(call.block, Direction.BACKWARD)
            self._visited_calls.append(open_backward.begin(call, copy))
        return copy

    def enter(self, forward_pass: ForwardPass) -> None:
        """Let the trial take part in the calling thread's backward, until `end`. Called by each visit in a backward."""
        trial, backward = self.trial, here.backward
        if backward is None:
            raise PrepareError(
                f"a prepared model's backward runs in the thread that calls torch.autograd, but that of {trial.name} "
                "runs in another thread, or was not called through torch.autograd. Call loss.backward() in the thread "
                "that has called the model."
            )
        passes = backward.passes.get(trial)
        if passes is not None:
            passes.add(forward_pass)
            return
        self.refuse_after_end()
        trial.acquire()
        backward.passes[trial] = {forward_pass}
        self.under_way.append(backward)
        trial.base.open()
        self.kernel_choices = TorchSettings.now().choices
        if not self._steps.under_way:
            if self._planner.plan is None:
                self._planner.settle_last()
            if self._planner.plan is None:
                raise PrepareError(
                    "a backward needs the model's plan, but there is none now: a later forward, in a first step, has "
                    "failed or was interrupted. Call backward before the next forward, or repeat the forward."
                )
            self._steps.open()

    def refuse_after_end(self) -> None:
        """Raise if the trial has ended before the backward."""
        if self.trial.ended:
            raise PrepareError(f"{self.trial.name} has ended; backward came too late. Call it before release(model).")

    def end(self, backward: Backward, *, failed: bool) -> None:
        """Called once the engine has ended a backward that the trial took part in. Gives up the lease, and ends the
        step if no backward may follow; but not within a forward or another backward, which goes on."""
        trial, steps, planner = self.trial, self._steps, self._planner
        self.under_way.remove(backward)
        trial.base.close()
        trial.busy.release()
        forward = steps.forward
        within_forward, within_backward = forward is not None, bool(self.under_way)
        if failed or not backward.keeps_graph:
            outer = [each.passes[trial] for each in self.under_way]
            for forward_pass in backward.passes[trial]:
                if forward_pass is not forward and not any(forward_pass in passes for passes in outer):
                    forward_pass.done = True
        trial.tasks.backward.end()
        for reference in self._visited_calls:
            if (call := reference()) is not None:
                call.forget()
        self._visited_calls = []
        trial.residency.await_gradients()
        if failed:
            self._gradients.forget()
            if not (within_forward or within_backward):
                trial.leave_after_error()
            elif planner.pilot is not None:
                planner.pilot.failed = True
            return
        self._gradients.check_taken()
        if trial.meter.counting and (trial.residency.spilled or planner.pilot is not None):
            # these are in host memory; the meter counts one all the same if an operator of a virtual device made it
            for gradient in [p.grad for block in planner.cut.blocks for p in block.slot_parameters]:
                if gradient is not None:
                    trial.meter.disown(gradient)
        if not within_forward:
            steps.trains = True
        elif forward is not None and forward.trains:
            steps.trains = True
            if not forward.has_trained:
                forward.has_trained = True
                steps.num_backwards += 1
        if not (within_forward or within_backward):
            steps.num_backwards += 1
            steps.learn_whether_simple()
            if not trial.ended:
                trial.leave_step_if_done()
            if trial.resumption is not None:
                trial.resumption.note()
