"""`perdure verify`: checks a database from its rows alone (architecture §9).

`verify` reads run by run through the `Reader` port and reports every row that breaks one of the
`CHECKS`; `WAITING` names the checks whose features do not exist yet.
"""

from perdure.ops.verify.checks import Check, Finding
from perdure.ops.verify.report import VerifyReport
from perdure.ops.verify.table import CHECKS, WAITING
from perdure.ops.verify.verifier import verify

__all__ = ["CHECKS", "WAITING", "Check", "Finding", "VerifyReport", "verify"]
