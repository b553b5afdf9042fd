"""Options: classes whose fields declare, explain and check what a user can set."""

from fastjax.options.fields import checked, fits, hints_of
from fastjax.options.words import describe, nested, required

__all__ = ["checked", "describe", "fits", "hints_of", "nested", "required"]
