"""Options: classes whose fields declare, explain and check what a user can set."""

from fastjax.options.fields import checked, fits, full_name, hints_of
from fastjax.options.words import describe, did_you_mean, meanings, nested, required

__all__ = ["checked", "describe", "did_you_mean", "fits", "full_name", "hints_of", "meanings", "nested", "required"]
