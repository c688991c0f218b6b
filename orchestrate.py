"""The whole product on one page: make a model's kernels faster, one experiment after the other, until told to stop.

    model.py -> profile -> plan, ranked by Amdahl's law
    for each op of the plan:
        starter kernel, its numbers searched -> the first incumbent
        until a rule says to move on:
            the agent edits kernel.py               propose
            a search sets the edit's numbers        tune
            the judge runs five stages and times it judge
            better than the incumbent?              decide
            git commit stays, or git reset          record (journal, git, results.tsv)
    the kernels go back into the model, and the whole model is measured

What each step does is in `autokernel/session.py` and below; what happens in which order, and why a kernel is kept, is
decided here and nowhere else.
"""

from __future__ import annotations

from autokernel.history import SHORTER, KernelHistory
from autokernel.judge.margin import KEEP_MARGIN
from autokernel.opening import open_session
from autokernel.records import Decision, Outcome, PlannedOp, Proposal, Verdict
from autokernel.rules import DEFAULT_RULES, Plateau, Rule, TargetSpeedup, first_reason_to_stop
from autokernel.session import NOTHING_LEFT, Session
from autokernel.settings import Settings
from autokernel.view import RunSummary, View

WORTH_TRYING = 1.01
"""An op whose whole headroom would speed the model up by less than this is left alone, unless the user names it."""


def run(settings: Settings, view: View, *, resume: str | None = None) -> RunSummary:
    """Optimize the model of `settings`, telling `view` what happens; with `resume`, go on with that run.

    Ctrl-C ends the loop at once; the best kernels so far are still measured in the model and reported.
    Raises: AutokernelError for what a person must mend; nothing recorded is lost then, and `resume` goes on.
    """
    with open_session(settings, view, resume) as session:
        try:
            reason = work(session, worth_trying(session))
        except KeyboardInterrupt:
            reason = "stopped by the user"
            view.note("stopping; measuring the model with the best kernels so far (Ctrl-C again to skip)")
        return finish(session, reason)


def work(session: Session, plan: list[PlannedOp]) -> str:
    """Optimize the ops of the plan as long as the run's limits and its agent allow; why it ended.

    An agent that waits for somebody outside ends it, too: `autokernel next` and `submit` are single turns of this loop.
    """
    settle(session)
    for rules in passes(session.settings):
        while (planned := next_op(session, plan, rules)) is not None and not session.limit_reached():
            optimize(session, planned, rules)
    return session.limit_reached() or "every op of the plan is done"


def finish(session: Session, reason: str) -> RunSummary:
    """Put the best kernels back into the model, measure the whole model, and close the run."""
    try:
        session.integrate()
    except KeyboardInterrupt:
        session.view.note("the whole model was not measured")
    return session.finish(reason)


def worth_trying(session: Session) -> list[PlannedOp]:
    """The plan's ops that have a starter; those that promise too little are left out unless the user names them."""
    plan = session.plan()
    named = session.settings.ops
    chosen = [op for op in plan if session.has_starter(op) and (named or op.potential >= WORTH_TRYING)]
    session.view.planned(chosen, session.wall_us, [op for op in plan if op not in chosen])
    return chosen


def passes(settings: Settings) -> tuple[tuple[Rule, ...], ...]:
    """Two passes over the plan: every op gets its turn first; with time left, a 2x speedup is no reason to stop."""
    rules = tuple(Plateau(patience=settings.patience) if isinstance(r, Plateau) else r for r in DEFAULT_RULES)
    return rules, tuple(rule for rule in rules if not isinstance(rule, TargetSpeedup))


def next_op(session: Session, plan: list[PlannedOp], rules: tuple[Rule, ...]) -> PlannedOp | None:
    """The op that can still give the whole model most, by Amdahl's law on what is left of its time and headroom.

    An op that was begun comes first until a rule closes it, also when the run was left and opened again.
    """
    open_ops = [planned for planned in plan if not session.is_closed(planned, rules)]
    begun = [planned for planned in open_ops if planned.op == session.current_op]
    return max(begun or open_ops, key=session.remaining_potential, default=None)


def optimize(session: Session, planned: PlannedOp, rules: tuple[Rule, ...]) -> None:
    """Run experiments on one op until a rule gives a reason to move on, or the run's own limit is reached."""
    history = session.start(planned)
    if history is None:  # the starter does not pass here; the session has said why
        return
    while (reason := first_reason_to_stop(rules, history)) is None:
        if session.limit_reached():
            return  # not the op's fault: a resumed run goes on with it
        proposal = session.tune_starter(history) or session.propose(history)
        if proposal is None:
            if session.limit_reached():  # the caps on money and tokens, or no time to wait for the model's server
                return
            reason = NOTHING_LEFT
            break
        history = experiment(session, history, proposal)
    session.move_on(history, reason)


def experiment(session: Session, history: KernelHistory, proposal: Proposal) -> KernelHistory:
    """Give the proposal its best numbers, judge it, decide, and record it whatever came out; the history with it."""
    proposal = session.tune(history, proposal)
    outcome = session.judge(history, proposal)
    decision, why = decide(history, proposal, outcome)
    return session.record(history, proposal, outcome, decision, why)


def settle(session: Session) -> KernelHistory | None:
    """Finish the experiment that a killed run left unfinished, whatever its limits say by now; None without one."""
    left = session.unfinished()
    return None if left is None else experiment(session, *left)


def decide(history: KernelHistory, proposal: Proposal, outcome: Outcome) -> tuple[Decision, str]:
    """Keep a candidate that passed every stage and is surely faster than the incumbent, or as fast and clearly shorter.

    `outcome.timing` of a winner is its confirmation: measured in new processes, on new inputs.
    """
    if outcome.verdict is not Verdict.PASS or outcome.timing is None:
        return Decision.REVERT, outcome.reason or "not timed"
    speedup = outcome.timing.speedup
    if speedup.low > 1 + KEEP_MARGIN:
        return Decision.KEEP, f"faster: {speedup}"
    as_fast = speedup.low > 1 - KEEP_MARGIN and speedup.high > 1
    if as_fast and len(proposal.kernel_py) <= SHORTER * len(history.incumbent):
        return (
            Decision.KEEP,
            f"as fast ({speedup}) and shorter",
        )
    return Decision.REVERT, f"not surely faster: {speedup}"
