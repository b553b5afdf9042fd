"""Reasoning, content and tool calls of an answer, told apart as its text comes.

`format` finds by renderings of the chat template how a model writes them, `parser` reads a text in parts, `growing`
an engine's tokens.
"""

from fastjax.generation.replies.format import ReplyFormat as ReplyFormat
from fastjax.generation.replies.parser import ReplyParser as ReplyParser
from fastjax.generation.replies.reply import Delta as Delta
from fastjax.generation.replies.reply import Reply as Reply
from fastjax.generation.replies.reply import ToolCall as ToolCall
