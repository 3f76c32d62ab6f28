"""Chat templates of published models, as far as messages of system, user and assistant go.

They are written here from what the published ones render, without tool calls; each renders the
same text as the model's own for such messages. With them come two small tokenizers that treat
spaces and newlines as those models' do.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

R1_EOS = "<\uff5cend▁of▁sentence\uff5c>"
ADDED = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<s>", "</s>", R1_EOS, "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are TEXT<|im_end|>\n' }}{% endif %}"
)
# Replies after the last question begin with thoughts if CONDITION; earlier ones have none.
QWEN3 = """
{%- set ns = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content %}
    {%- set thoughts = '' %}
    {%- if m.role == 'assistant' and '</think>' in text %}
        {%- set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set text = text.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.question and (CONDITION) %}
        {{- '<think>\n' + thoughts + '\n</think>\n\n' + text.lstrip('\n') }}
    {%- else %}
        {{- text }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}GENERATION{% endif %}"""
NO_THINKING = (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
# The thoughts of every reply are dropped, and a prompt opens new ones.
R1 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
    {%- else %}{{- '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] }}
        {{- '<\uff5cend▁of▁sentence\uff5c>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"""
LLAMA3 = """
{{- bos_token }}HEADER
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if ALWAYS or add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
# Llama 3.1 writes a fixed date, 3.2 today's, unless there is a date_string.
DATED = """
{%- if not date_string is defined %}{% set date_string = TODAY %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}"""
ALTERNATE = (
    "{%- for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
TURNS = """
{%- set has_system = messages[0].role == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}"""
LLAMA2 = (
    TURNS
    + ALTERNATE
    + """
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
        {%- set text = system + m.content if has_system and loop.first else m.content %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + m.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
)
MISTRAL = (
    "{% set turns = messages %}"
    + ALTERNATE
    + """
{{- bos_token }}
{%- for m in turns %}
    {{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}
{%- endfor %}"""
)
# The system message stands in the last message, if that is the user's.
NEMO = (
    TURNS
    + ALTERNATE
    + """
{{- bos_token }}
{%- for m in turns %}
    {%- set text = messages[0].content + '\n\n' if has_system and loop.last else '' %}
    {{- '[INST]' + text + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}
{%- endfor %}"""
)
SMOL = "a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN = "Qwen, created by Alibaba Cloud. You are a helpful assistant."


def _fill(template: str, **words: str) -> str:
    for word, text in words.items():
        template = template.replace(word, text)
    return template


TEMPLATES = {
    "qwen2.5": _fill(SYSTEM + CHATML, TEXT=QWEN),
    "smollm2": _fill(SYSTEM + CHATML, TEXT=SMOL),
    "qwen3": _fill(QWEN3, CONDITION="loop.last or thoughts", GENERATION=NO_THINKING),
    "qwen3-instruct-2507": _fill(QWEN3, CONDITION="thoughts", GENERATION=""),
    "qwen3-thinking-2507": _fill(
        QWEN3, CONDITION="loop.last or thoughts", GENERATION="{{ '<think>\n' }}"
    ),
    "r1-distill": R1,
    "llama2": LLAMA2,
    "llama3-first": _fill(LLAMA3, HEADER="", ALWAYS="true"),
    "llama3": _fill(LLAMA3, HEADER="", ALWAYS="false"),
    "llama3.1": _fill(LLAMA3, HEADER=DATED, ALWAYS="false", TODAY="'26 Jul 2024'"),
    "llama3.2": _fill(LLAMA3, HEADER=DATED, ALWAYS="false", TODAY="strftime_now('%d %b %Y')"),
    "mistral-v0.2": MISTRAL,
    "mistral-nemo": NEMO,
}
SENTENCEPIECE = ("llama2", "mistral-v0.2")
EOS = {
    "<|im_end|>": ("qwen", "smollm2"), "<|eot_id|>": ("llama3",),
    R1_EOS: ("r1",), "</s>": ("llama2", "mistral"),
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """One token per byte, as byte-level BPE starts, and one for two newlines, as Qwen has."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*bytes_, "ĊĊ", "Ġt"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spaced_tokenizer() -> Tokenizer:
    """Like Llama 2's: a space, written as ▁, before every text and after every special token."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [chr(i) for i in range(33, 127)]
    merges = [("▁", "t"), ("▁", "1"), ("]", "."), ("▁", "▁")]
    vocabulary = ["<unk>", *pieces, "▁", *("".join(pair) for pair in merges)]
    numbered = {piece: i for i, piece in enumerate(vocabulary)}
    model = models.BPE(numbered, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def save_tokenizer(name: str, folder: Path) -> Path:
    """Write one of the templates, with a fitting tokenizer."""
    (eos,) = (token for token, names in EOS.items() if name.startswith(names))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spaced_tokenizer() if name in SENTENCEPIECE else byte_tokenizer(),
        bos_token=AddedToken("<s>", normalized=False),
        eos_token=AddedToken(eos, normalized=False),
        chat_template=TEMPLATES[name],
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.save_pretrained(folder)
    return folder
