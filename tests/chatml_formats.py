"""Chat formats with the turns of ChatML, see `chat_formats`."""

from __future__ import annotations

from tests.chat_templates import ARGUMENTS, HERMES_CALLS, TOOLS, XML_CALL, Format, calls, conversation

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
IM_STOPS = ("<|endoftext|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
IM_USER = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
IM_PROMPT = "<|im_start|>assistant\n"
IM_TOOLS = f"<|im_start|>system\n<tools>\n{TOOLS}</tools><|im_end|>{{{{ '\\n' }}}}"
IM_OUTPUT = (
    "{{ '<|im_start|>user' if is_first }}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{{ '<|im_end|>\\n' if is_final }}"
)


def chatml(answer: str, *, opening: str = "", tools: str = IM_TOOLS, output: str = IM_OUTPUT, begin: str = "") -> str:
    """Return a template with the turns of ChatML; `opening` begins the answer."""
    assistant = f"<|im_start|>assistant\n{answer}<|im_end|>{{{{ '\\n' }}}}"
    return conversation(
        begin=begin, user=IM_USER, assistant=assistant, prompt=IM_PROMPT + opening, tools=tools, output=output
    )


HERMES = Format(
    template=chatml("{{ m.content }}" + HERMES_CALLS), special=IM, tags=TAGS[2:], stops=IM_STOPS, end="<|im_end|>"
)
QWEN3 = Format(
    template=chatml(
        "{% if is_new and (is_last or m.reasoning_content) %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}" + HERMES_CALLS,
        opening="{{ '' if enable_thinking|default(true) else '<think>\\n\\n</think>\\n\\n' }}",
    ),
    special=IM,
    tags=TAGS,
    stops=IM_STOPS,
    end="<|im_end|>",
    reasoning_parser="qwen3",
)
QWEN35 = Format(
    template=chatml(
        "{% if is_new %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
        + calls(XML_CALL, before="{{ '\\n\\n' if m.content }}", between="\n"),
        opening="<think>\n",
    ),
    special=IM,
    tags=TAGS,
    stops=IM_STOPS,
    end="<|im_end|>",
    tool_parser="qwen3_coder",
    reasoning_parser="qwen3",
    opens=True,
)
NEMOTRON3 = Format(
    template=chatml(
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}"
        "{{ m.content }}{{ '\\n' if m.tool_calls and m.content }}" + calls(XML_CALL + "\n"),
        opening="<think>\n",
    ),
    special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    tags=TAGS,
    stops=("</s>", "<|im_end|>"),
    end="<|im_end|>",
    tool_parser="qwen3_coder",
    reasoning_parser="deepseek_r1",
    opens=True,
)
SMOLLM3 = Format(  # writes no calls and keeps no field of thoughts, but tells the model to think in tags
    template=chatml(
        "{{ m.content }}",
        begin="<|im_start|>system\nThink in <think> </think>.<|im_end|>\n",
        output="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
    ),
    special=("<|im_start|>", "<|im_end|>", "<|end_of_text|>"),
    tags=TAGS,
    stops=("<|end_of_text|>", "<|im_end|>"),
    end="<|im_end|>",
    reasoning_parser="deepseek_r1",
)
LFM2 = Format(  # writes tools, but calls nowhere
    template=chatml(
        "{{ m.content }}",
        begin="{{ bos_token }}",
        tools="<|im_start|>system\n<|tool_list_start|>[{{ tools | tojson }}]<|tool_list_end|><|im_end|>\n",
        output="<|im_start|>tool\n<|tool_response_start|>{{ m.content }}<|tool_response_end|><|im_end|>\n",
    ),
    special=(
        *("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
    ),
    stops=("<|im_end|>",),
    end="<|im_end|>",
)
INTERNLM = Format(
    template=chatml("{{ m.content }}", tools="", output=""),
    special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
    stops=("</s>", "<|im_end|>"),
    end="<|im_end|>",
)
OLMO3 = Format(  # ends a last turn with another token
    template=conversation(
        tools="<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n",
        user=IM_USER,
        assistant="<|im_start|>assistant\n{{ m.content }}"
        + calls(
            f"{{{{ c.name }}}}({ARGUMENTS}{{{{ p }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last }}}}"
            "{% endfor %})",
            before="<function_calls>",
            between="\n",
            after="</function_calls>",
        )
        + "{{ eos_token if is_last else '<|im_end|>\\n' }}",
        output="<|im_start|>environment\n{{ m.content }}<|im_end|>\n",
        prompt=IM_PROMPT,
    ),
    special=IM,
    stops=("<|im_end|>", "<|endoftext|>"),
    end="<|endoftext|>",
    tool_parser="olmo3",
    drops_text=True,
)

PHI4 = Format(
    template=conversation(
        user="<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>",
        assistant="<|im_start|>assistant<|im_sep|>{{ m.content }}<|im_end|>",
        prompt="<|im_start|>assistant<|im_sep|>",
    ),
    special=(*IM, "<|im_sep|>"),
    stops=("<|endoftext|>", "<|im_end|>"),
    end="<|im_end|>",
)
