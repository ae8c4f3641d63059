"""Hold any sequence layer to what it says: causal, trained, the same in pieces, stable, and no leaks.

`audit` runs the checks and returns a report; `checks` makes them tests of any repository; an `Adapter` says
how a layer's state and documents are passed. docs/audit.md has what each check proves, and a gallery.
"""

from titans_core.audit.adapter import Adapter
from titans_core.audit.plugin import checks
from titans_core.audit.registry import CHECKS, check
from titans_core.audit.report import AuditError, Check, Example, NotApplicable, Outcome, Report, Result
from titans_core.audit.run import audit
from titans_core.audit.subject import Subject

__all__ = [
    "CHECKS",
    "Adapter",
    "AuditError",
    "Check",
    "Example",
    "NotApplicable",
    "Outcome",
    "Report",
    "Result",
    "Subject",
    "audit",
    "check",
    "checks",
]
