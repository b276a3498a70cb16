"""All names of vLLM's server that the gateway uses, so that a vLLM upgrade changes one file. Importing takes seconds.

Other modules of the gateway import this one, late: `from forge_rl.gateway import vllm_internals as vllm`.
"""

from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock as AnthropicContentBlock
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest as AnthropicCountTokensRequest
from vllm.entrypoints.anthropic.protocol import AnthropicMessage as AnthropicMessage
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest as AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs as ChatCompletionLogProbs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs as CompletionLogProbs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest as CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as OpenAIServingCompletion
from vllm.entrypoints.openai.responses.api_router import (
    _convert_stream_to_sse_events as _convert_stream_to_sse_events,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_tool_dicts as construct_tool_dicts
from vllm.entrypoints.serve.engine.protocol import ErrorResponse as ErrorResponse
from vllm.exceptions import VLLMClientError as VLLMClientError
from vllm.inputs import tokens_input as tokens_input
from vllm.logprobs import Logprob as Logprob
from vllm.outputs import CompletionOutput as CompletionOutput
from vllm.outputs import RequestOutput as RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer as OnlineRenderer
from vllm.renderers.online_renderer import ResponsesRenderResult as ResponsesRenderResult
from vllm.sampling_params import RequestOutputKind as RequestOutputKind
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.tokenizers.hf import get_cached_tokenizer as get_cached_tokenizer
from vllm.v1.structured_output.backend_xgrammar import (
    has_xgrammar_unsupported_json_features as has_xgrammar_unsupported_json_features,
)
from vllm.v1.structured_output.utils import choice_as_grammar as choice_as_grammar
from vllm.v1.structured_output.utils import grammar_is_likely_lark as grammar_is_likely_lark
