"""Show which words of the prompt each generated token of a language model attended to."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from overt.capture import generate

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=4, **sizes)).eval()  # yours
names = ["<s>", "the", "capital", "of", "France", "is"]  # tokenizer.convert_ids_to_tokens(...)
prompt = torch.tensor([[1, 7, 8, 9, 10, 11]])

written = generate(model, input_ids=prompt, max_new_tokens=3, do_sample=False)
attention = written.attention.layer(-1).over_heads()  # axes: b l h q k; q is the new token
tokens = written.output.sequences[0, len(names) :].tolist()
for token, row in zip(tokens, attention.weights[0, 0, 0], strict=True):
    best = row.argsort(descending=True)[:3]
    print(token, "looked at", [(names[at], round(float(row[at]), 3)) for at in best])
attention.save("answer.html")  # .png is for photos
