"""All names that we use of vLLM's parsers of calls and thoughts, so that an upgrade changes one file. Slow to import.

Other modules import this one late: `from forge_rl.tokens import vllm_parsers as vllm`.
"""

from vllm.entrypoints.generate.base.protocol import DeltaMessage as DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager as ParserManager
from vllm.reasoning import ReasoningParserManager as ReasoningParserManager
from vllm.tool_parsers import ToolParserManager as ToolParserManager
