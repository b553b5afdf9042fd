"""Options: classes whose fields declare, explain and check what a user can set."""

from fastjax.options.fields import checked, fits, full_name, hints_of
from fastjax.options.words import describe, meanings, nested, required

__all__ = ["checked", "describe", "fits", "full_name", "hints_of", "meanings", "nested", "required"]
