"""Options: classes whose fields declare, explain and check what a user can set."""

from fastjax.options.section import fits, hints_of, section
from fastjax.options.words import describe, nested, required

__all__ = ["describe", "fits", "hints_of", "nested", "required", "section"]
