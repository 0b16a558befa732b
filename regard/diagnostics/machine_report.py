"""The report of a machine: facts and checks, as text for a bug report."""

from dataclasses import dataclass

from regard.diagnostics.machine_checks import MachineCheck, run_checks
from regard.diagnostics.machine_facts import describe_environment, describe_hardware, describe_versions, redact


@dataclass(frozen=True)
class MachineReport:
    """Facts about the machine by section, and the results of the checks."""

    facts: dict[str, dict[str, str]]
    checks: list[MachineCheck]

    @property
    def ok(self) -> bool:
        """Whether no check found a problem; warnings are allowed."""
        return all(check.status != "problem" for check in self.checks)

    def __str__(self) -> str:
        lines = []
        for section, facts in self.facts.items():
            width = max(map(len, facts), default=0)
            lines += [section, *(f"  {name:<{width}}  {value}" for name, value in facts.items())]
        width = max((len(check.name) for check in self.checks), default=0)
        lines.append("checks")
        for check in self.checks:
            advice = f". {check.advice}" if check.advice else ""
            lines.append(f"  {check.status:<7}  {check.name:<{width}}  {check.message}{advice}")
        problems = sum(check.status == "problem" for check in self.checks)
        warnings = sum(check.status == "warning" for check in self.checks)
        lines.append(
            f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
        )
        return redact("\n".join(lines))


def doctor() -> MachineReport:
    """Describe and check this machine: what a bug report needs, and whether everything that Regard uses works.

    Printed, the report contains neither user name nor host name, and no path of the home folder. Computations that may
    crash run in processes of their own.

    >>> report = doctor()  # doctest: +SKIP
    >>> report.ok, [check.message for check in report.checks if check.status != "ok"]  # doctest: +SKIP
    (True, [])
    """
    checks, torch_facts = run_checks()
    facts = {"versions": describe_versions(), "machine": describe_hardware() | torch_facts}
    if environment := describe_environment():
        facts["environment"] = environment
    return MachineReport(facts, checks)
