"""Show which words of the prompt each generated word of a language model attended to."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from overt.capture import generate

words = "the capital of France is Paris London in a city".split()
spelling = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, words[0]))
spelling.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling)  # AutoTokenizer.from_pretrained(...)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=len(words), num_attention_heads=4, eos_token_id=None, **sizes)
model = LlamaForCausalLM(config).eval()  # yours

inputs = tokenizer("the capital of France is", return_tensors="pt", return_token_type_ids=False)
written = generate(model, **inputs, tokenizer=tokenizer, max_new_tokens=3, do_sample=False)
attention = written.attention.layer(-1).over_heads()  # axes: b l h q k; q is the new token
prompt, new = (axis.spans[0].geometry.tokens(0) for axis in (attention.keys, attention.queries))
for word, row in zip(new, attention.weights[0, 0, 0], strict=True):
    best = row.argsort(descending=True)[:3]
    print(word, "looked at", [(prompt[at], round(float(row[at]), 3)) for at in best])
written.attention.save("answer.html")  # a page with every new word, layer and head
written.attention.save("answer.png", query=0)  # a figure of the first new word
