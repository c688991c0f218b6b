"""The whole product on one page: make a model's kernels faster, one experiment after the other, until told to stop.

    model.py -> profile -> plan, ranked by Amdahl's law
    for each op of the plan:
        starter kernel -> the first incumbent
        until a rule says to move on:
            the agent edits kernel.py               propose
            the judge runs five stages and times it judge
            better than the incumbent?              decide
            git commit stays, or git reset          record (journal, git, results.tsv)
    the kernels go back into the model, and the whole model is measured

What each step does is in `autokernel/session.py` and below; what happens in which order, and why a kernel is kept, is
decided here and nowhere else.
"""

from __future__ import annotations

from autokernel.history import KernelHistory
from autokernel.judge.engine import KEEP_MARGIN
from autokernel.records import Decision, Outcome, PlannedOp, Proposal, Verdict
from autokernel.rules import DEFAULT_RULES, Plateau, Rule, first_reason_to_stop
from autokernel.session import Session
from autokernel.settings import Settings
from autokernel.view import RunSummary, View

SHORTER = 0.90
"""An equally fast kernel is kept when its text is at most this fraction of the incumbent's."""

WORTH_TRYING = 1.01
"""An op whose whole headroom would speed the model up by less than this is left alone, unless the user names it."""


def run(settings: Settings, view: View, *, resume: str | None = None) -> RunSummary:
    """Optimize the model of `settings`, telling `view` what happens; with `resume`, go on with that run.

    Ctrl-C ends the loop at once; the best kernels so far are still measured in the model and reported.
    Raises: AutokernelError for what a person must mend; nothing recorded is lost then, and `resume` goes on.
    """
    with Session.open(settings, view, resume) as session:
        rules = rules_for(session.settings)
        reason = "every op of the plan is done"
        try:
            for planned in worth_trying(session):
                if limit := session.limit_reached():
                    reason = limit
                    break
                optimize(session, planned, rules)
        except KeyboardInterrupt:
            reason = "stopped by the user"
            view.note("stopping; measuring the model with the best kernels so far (Ctrl-C again to skip)")
        try:
            session.integrate()
        except KeyboardInterrupt:
            view.note("the whole model was not measured")
        return session.finish(reason)


def worth_trying(session: Session) -> list[PlannedOp]:
    """The plan's ops by what the whole model can gain, most first; those that promise too little are left out."""
    plan = session.plan()
    named = session.settings.ops
    chosen = [op for op in plan if session.has_starter(op) and (named or op.potential >= WORTH_TRYING)]
    session.view.planned(chosen, session.wall_us, [op for op in plan if op not in chosen])
    return [op for op in chosen if not session.is_done(op)]


def optimize(session: Session, planned: PlannedOp, rules: tuple[Rule, ...]) -> None:
    """Run experiments on one op until a rule gives a reason to move on, or the run's own limit is reached."""
    history = session.start(planned)
    if history is None:  # the starter does not pass here; the session has said why
        return
    while (reason := first_reason_to_stop(rules, history)) is None:
        if session.limit_reached():
            return  # not the op's fault: a resumed run goes on with it
        proposal = session.propose(history)
        if proposal is None:
            reason = "the agent has nothing left to try"
            break
        outcome = session.judge(history, proposal)
        decision, why = decide(history, proposal, outcome)
        history = session.record(history, proposal, outcome, decision, why)
    session.move_on(history, reason)


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


def rules_for(settings: Settings) -> tuple[Rule, ...]:
    """The reasons to move on: five reverts in a row, 90 % of the peak that binds, two active hours, 2x over PyTorch."""
    return tuple(Plateau(patience=settings.patience) if isinstance(r, Plateau) else r for r in DEFAULT_RULES)
