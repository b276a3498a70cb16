"""Chat formats with turns of the vendors' own, see `chat_formats`."""

from __future__ import annotations

from dataclasses import replace

from tests.chat_templates import ARGUMENTS, HERMES_CALLS, OBJECT, PARAMETERS, TOOLS, VALUE, Format, calls, conversation

PHI3 = Format(
    template=conversation(
        user="<|{{ m.role }}|>\n{{ m.content }}<|end|>\n",
        assistant="<|assistant|>\n{{ m.content }}<|end|>\n",
        prompt="<|assistant|>\n",
    ),
    special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    stops=("<|end|>", "<|endoftext|>"),
    end="<|end|>",
)
OLMO2 = Format(
    template=conversation(
        begin="{{ bos_token }}",
        user="<|{{ m.role }}|>\n{{ m.content }}\n",
        assistant="<|assistant|>\n{{ m.content }}{{ eos_token }}{{ '' if is_last else '\\n' }}",
        prompt="<|assistant|>\n",
    ),
    special=("<|endoftext|>",),
    stops=("<|endoftext|>",),
    end="<|endoftext|>",
)
LLAMA_TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
LLAMA3 = Format(  # writes one call, alone
    template=conversation(
        begin="{{ bos_token }}",
        tools=f"<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n{TOOLS}<|eot_id|>",
        user=LLAMA_TURN,
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{% if m.tool_calls %}"
        "{{ raise_exception('one call') if m.tool_calls | length > 1 }}{% set c = m.tool_calls[0].function %}"
        f"{PARAMETERS}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|eot_id|>",
        output="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>",
        prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    end="<|eot_id|>",
    tool_parser="llama3_json",
)
LLAMA4 = Format(  # has no <|python_tag|>, without which vLLM's JSON parsers of Llama do not load
    template=conversation(
        begin="{{ bos_token }}",
        tools="<|header_start|>system<|header_end|>\n\n{{ tools | tojson }}<|eot|>",
        user="<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content }}<|eot|>",
        assistant="<|header_start|>assistant<|header_end|>\n\n{% if m.tool_calls %}<|python_start|>{{ m.content }}"
        f"<|python_end|>{calls(PARAMETERS)}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|eot|>",
        output="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
        prompt="<|header_start|>assistant<|header_end|>\n\n",
    ),
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
        *("<|python_start|>", "<|python_end|>"),
    ),
    stops=("<|end_of_text|>", "<|eom|>", "<|eot|>"),
    end="<|eot|>",
    tool_parser="",
)
NO_TEMPLATE = Format(template="", special=("<s>", "</s>"), stops=("</s>",), end="</s>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_TOOLS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
MIXTRAL = Format(
    template=conversation(
        begin="{{ bos_token }}",
        user=" [INST] {{ m.content }} [/INST]",
        assistant=" {{ m.content }}{{ eos_token }}",
        prompt="",
    ),
    special=("<s>", "</s>"),
    stops=("</s>",),
    end="</s>",
)


def mistral_v3(blank: str) -> Format:
    """Return the format of Mistral's third tokenizer, with a blank after its markers or without one.

    Text beside calls is not written. An id must have nine characters.
    """
    call = (
        "{{ raise_exception('an id of nine') if t.id | length != 9 }}{{ (t.function | tojson)[:-1] }}, "
        '"id": "{{ t.id }}"}'
    )
    written_calls = calls(call, before=f"[TOOL_CALLS]{blank}[", between=", ", after="]")
    return Format(
        template=conversation(
            begin="{{ bos_token }}",
            tools=f"[AVAILABLE_TOOLS]{blank}{{{{ tools | tojson }}}}[/AVAILABLE_TOOLS]",
            user=f"[INST]{blank}{{{{ m.content }}}}[/INST]",
            assistant=f"{{% if m.tool_calls %}}{written_calls}{{% else %}}{blank}{{{{ m.content }}}}{{% endif %}}"
            "{{ eos_token }}",
            output=f'[TOOL_RESULTS]{blank}{{"content": {{{{ m.content }}}}, "call_id": "{{{{ m.tool_call_id }}}}"}}'
            "{{ raise_exception('an id of nine') if m.tool_call_id | length != 9 }}[/TOOL_RESULTS]",
            prompt="",
        ),
        special=(*MISTRAL, *MISTRAL_TOOLS),
        stops=("</s>",),
        end="</s>",
        tool_parser="mistral",
    )


MINISTRAL3 = Format(
    template=conversation(
        begin="{{ bos_token }}",
        tools="[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
        system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        user="[INST]{{ m.content }}[/INST]",
        assistant="{{ m.content }}"
        + calls("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}")
        + "{{ eos_token }}",
        output="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        prompt="",
    ),
    special=(*MISTRAL, *MISTRAL_TOOLS, "[ARGS]", "[CALL_ID]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    stops=("</s>",),
    end="</s>",
    tool_parser="mistral",
)
GEMMA_TURN = "<start_of_turn>user\n{{ m.content }}<end_of_turn>\n"
GEMMA_ANSWER = "<start_of_turn>model\n{{ m.content }}<end_of_turn>\n"


def gemma(system: str) -> Format:
    """Return the format of Gemma 2 and 3, which treat system messages differently."""
    return Format(
        template=conversation(
            begin="{{ bos_token }}",
            system=system,
            user=GEMMA_TURN,
            assistant=GEMMA_ANSWER,
            prompt="<start_of_turn>model\n",
        ),
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        stops=("<end_of_turn>", "<eos>"),
        end="<end_of_turn>",
    )


GEMMA4_VALUE = '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}'
GEMMA4_OUTPUT = (
    "{% if not is_last and loop.nextitem.role == 'tool' %}"
    '<|tool_response>response:{{ m.tool_calls[0].function.name }}{value:<|"|>{{ loop.nextitem.content }}<|"|>}'
    "<tool_response|>{% else %}<|tool_response>{% endif %}"
)
GEMMA4 = Format(  # writes an output within the turn of its call, whose end is the opening of the output
    template=conversation(
        begin="{{ bos_token }}",
        tools="<|turn>system\n{% for t in tools %}<|tool>declaration:{{ t.function.name }}<tool|>{% endfor %}<turn|>\n",
        user="<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n",
        assistant="<|turn>model\n{% if is_new and m.reasoning_content and m.tool_calls %}<|channel>thought\n"
        "{{ m.reasoning_content }}\n<channel|>{% endif %}"
        + calls(
            f"<|tool_call>call:{{{{ c.name }}}}{{{{ '{{' }}}}{ARGUMENTS}{{{{ p }}}}:{GEMMA4_VALUE}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
        )
        + f"{{{{ m.content }}}}{{% if m.tool_calls %}}{GEMMA4_OUTPUT}{{% else %}}<turn|>\n{{% endif %}}",
        prompt="{% if messages[-1].role != 'tool' %}<|turn>model\n{% if not enable_thinking %}<|channel>thought\n"
        "<channel|>{% endif %}{% endif %}",
    ),
    special=(
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
    ),
    stops=("<turn|>", "<|tool_response>", "<eos>"),
    end="<turn|>",
    tool_parser="gemma4",
    reasoning_parser="gemma4",
    drops_text=True,
)
GRANITE_TURN = "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
GRANITE_PROMPT = "<|start_of_role|>assistant<|end_of_role|>"
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
GRANITE3 = Format(  # writes tools and outputs, but calls nowhere, and thinks only where a variable says so
    template=conversation(
        begin="<|start_of_role|>system<|end_of_role|>{{ 'Think in <think></think>.' if thinking }}<|end_of_text|>\n",
        tools="<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n",
        user=GRANITE_TURN,
        assistant=GRANITE_TURN,
        output=GRANITE_TURN,
        prompt=GRANITE_PROMPT,
    ),
    special=GRANITE,
    tags=("<think>", "</think>"),
    stops=("<|end_of_text|>",),
    end="<|end_of_text|>",
    reasoning_parser="deepseek_r1",
)
GRANITE4 = Format(
    template=conversation(
        tools=f"<|start_of_role|>system<|end_of_role|><tools>\n{TOOLS}</tools><|end_of_text|>\n",
        user=GRANITE_TURN,
        assistant=f"{GRANITE_PROMPT}{{{{ m.content }}}}{HERMES_CALLS}<|end_of_text|>{{{{ '\n' }}}}",
        output="{{ '<|start_of_role|>user<|end_of_role|>' if is_first }}\n<tool_response>\n{{ m.content }}\n"
        "</tool_response>{{ '<|end_of_text|>\n' if is_final }}",
        prompt=GRANITE_PROMPT,
    ),
    special=GRANITE,
    tags=("<tool_call>", "</tool_call>"),
    stops=("<|end_of_text|>",),
    end="<|end_of_text|>",
)
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM4 = Format(  # ends no turn, and writes calls nowhere
    template=conversation(
        begin="[gMASK]<sop>",
        tools="<|system|>\n{{ tools | tojson }}",
        user="<|{{ m.role }}|>\n{{ m.content }}",
        assistant="<|assistant|>\n{{ m.content }}",
        prompt="<|assistant|>",
    ),
    special=GLM,
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    end="<|user|>",
)
GLM45 = Format(
    template=conversation(
        begin="[gMASK]<sop>",
        tools=f"<|system|>\n<tools>\n{TOOLS}</tools>",
        user="<|{{ m.role }}|>\n{{ m.content }}",
        assistant="<|assistant|>\n<think>{{ m.reasoning_content if is_new }}</think>{% if m.content %}\n{{ m.content }}"
        "{% endif %}"
        + calls(
            f"\n<tool_call>{{{{ c.name }}}}{ARGUMENTS}\n<arg_key>{{{{ p }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>"
            "{% endfor %}\n</tool_call>"
        ),
        output="{{ '<|observation|>' if is_first }}\n<tool_response>\n{{ m.content }}\n</tool_response>",
        prompt="<|assistant|>{{ '' if enable_thinking|default(true) else '\\n<think></think>' }}",
    ),
    special=GLM,
    tags=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    end="<|user|>",
    tool_parser="glm45",
    reasoning_parser="deepseek_r1",
)
GLM47 = replace(
    GLM45,
    template=conversation(
        begin="[gMASK]<sop>",
        tools=f"<|system|>\n<tools>\n{TOOLS}</tools>",
        user="<|{{ m.role }}|>{{ m.content }}",
        assistant="<|assistant|>{{ '<think>' ~ m.reasoning_content if is_new and m.reasoning_content else '' }}</think>"
        "{{ m.content }}"
        + calls(
            f"<tool_call>{{{{ c.name }}}}{ARGUMENTS}<arg_key>{{{{ p }}}}</arg_key><arg_value>{VALUE}</arg_value>"
            "{% endfor %}</tool_call>"
        ),
        output="{{ '<|observation|>' if is_first }}<tool_response>{{ m.content }}</tool_response>",
        prompt="<|assistant|>{{ '<think>' if enable_thinking|default(true) else '</think>' }}",
    ),
    opens=True,
)
ERNIE = Format(  # ends turns with a token that its settings do not name
    template=conversation(
        begin="<|begin_of_sentence|>",
        system="{{ m.content }}\n",
        user="User: {{ m.content }}\n",
        assistant="Assistant: {{ m.content }}<|end_of_sentence|>",
        prompt="Assistant: ",
    ),
    special=("<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>"),
    stops=("</s>",),
    end="<|end_of_sentence|>",
)
MINIMAX = Format(
    template=conversation(
        begin=f"]~!b[]~b]system\n{{% if tools %}}<tools>\n{TOOLS}</tools>{{% endif %}}[e~[\n",
        user="]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
        assistant="]~b]ai\n{% if is_new and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}"
        + calls(
            f'<invoke name="{{{{ c.name }}}}">\n{ARGUMENTS}<parameter name="{{{{ p }}}}">{VALUE}</parameter>\n'
            "{% endfor %}</invoke>\n",
            before="\n<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        )
        + "[e~[\n",
        output="{{ ']~b]tool' if is_first }}\n<response>{{ m.content }}</response>{{ '[e~[\\n' if is_final }}",
        prompt="]~b]ai\n<think>\n",
    ),
    special=("]~!b[", "]~b]", "[e~["),
    tags=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    stops=("[e~[",),
    end="[e~[",
    tool_parser="minimax_m2",
    reasoning_parser="deepseek_r1",
    opens=True,
)
SEED = Format(
    template=conversation(
        tools="{{ bos_token }}system\n{{ tools | tojson }}{{ eos_token }}",
        user="{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}",
        assistant="{{ bos_token }}assistant{% if m.reasoning_content %}\n"
        "<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}"
        "{% if m.content %}\n{{ m.content }}{% endif %}{{ '\\n' if m.content and m.tool_calls }}"
        + calls(
            f"\n<seed:tool_call>\n<function={{{{ c.name }}}}>\n{ARGUMENTS}<parameter={{{{ p }}}}>{VALUE}</parameter>\n"
            "{% endfor %}</function>\n</seed:tool_call>"
        )
        + "{{ eos_token }}",
        output="{{ bos_token }}tool\n{{ m.content }}{{ eos_token }}",
        prompt="{{ bos_token }}assistant\n",
    ),
    special=("<seed:bos>", "<seed:eos>", "<seed:pad>"),
    tags=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    stops=("<seed:eos>",),
    end="<seed:eos>",
    tool_parser="seed_oss",
    reasoning_parser="seed_oss",
)
NEMOTRON2 = Format(  # vLLM has no parser of its calls; NVIDIA publishes one beside the model
    template=conversation(
        tools="<SPECIAL_10>System\n<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>\n",
        system="<SPECIAL_10>System\n{{ m.content }}\n",
        user="<SPECIAL_11>User\n{{ m.content }}\n",
        assistant="<SPECIAL_11>Assistant\n{{ '<think>\\n' if is_last and not m.tool_calls }}{{ m.content }}"
        + calls(OBJECT, before="<TOOLCALL>[", between=", ", after="]</TOOLCALL>")
        + "\n<SPECIAL_12>\n",
        output="{{ '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' if is_first }}{{ m.content }}"
        "{{ ']</TOOL_RESPONSE>' if is_final }}",
        prompt="<SPECIAL_11>Assistant\n<think>\n",
    ),
    special=("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    tags=("<think>", "</think>"),
    stops=("</s>", "<SPECIAL_12>"),
    end="<SPECIAL_12>",
    tool_parser="",
    reasoning_parser="deepseek_r1",
    opens=True,
)
HARMONY = Format(  # writes one call of a turn; a text beside it is a thought
    template=conversation(
        tools="<|start|>developer<|message|>{{ tools | tojson }}<|end|>",
        user="<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
        assistant="{% set thought = m.reasoning_content or (m.content if m.tool_calls) %}{% if thought and is_new %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif %}{% if m.tool_calls %}"
        "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
        "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
        "{{ c.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if is_last and not add_generation_prompt else '<|end|>' }}{% endif %}",
        output="<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>",
        prompt="<|start|>assistant",
    ),
    special=(
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
        *("<|return|>", "<|call|>", "<|endoftext|>"),
    ),
    stops=("<|call|>", "<|endoftext|>", "<|return|>"),
    end="<|return|>",
    tool_parser="openai",
    reasoning_parser="openai_gptoss",
)
KIMI_SPECIAL = ("[BOS]", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")


def moonshot(tools: str, written_calls: str, parser: str, tags: tuple[str, ...]) -> Format:
    """Return a format with the turns of Moonlight and Kimi K2."""
    return Format(
        template=conversation(
            tools=tools,
            system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
            user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
            assistant=f"<|im_assistant|>assistant<|im_middle|>{{{{ m.content }}}}{written_calls}<|im_end|>",
            output="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            prompt="<|im_assistant|>assistant<|im_middle|>",
        ),
        special=KIMI_SPECIAL,
        tags=tags,
        stops=("[EOS]", "<|im_end|>"),
        end="<|im_end|>",
        tool_parser=parser,
    )


MOONLIGHT = moonshot("", "", "hermes", ())
KIMI2 = moonshot(  # whose ids of calls hold their names
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>",
    calls(
        "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "kimi_k2",
    (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
)
