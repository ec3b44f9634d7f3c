"""Reads exports with transformers, in an environment that holds it. Nothing of ours is imported.

Arguments: folders of packages that precede those of the environment. Prints the version of
transformers, and a JSON object for each request, which is a line of JSON on its standard input.
"""

import json
import sys

sys.path[:0] = sys.argv[1:]
import torch  # noqa: E402 (the path is set first)
import transformers  # noqa: E402 (the path is set first)


def compute_logits(folder, inputs):
    """The logits, and what is odd about the folder."""
    with open(f"{folder}/config.json") as file:
        is_text = json.load(file)["architectures"][0].endswith(("LM", "LMHeadModel"))
    auto = (
        transformers.AutoModelForCausalLM
        if is_text
        else transformers.AutoModelForImageClassification
    )
    # eager: the others leave out the cap of the scores
    keys = {"attn_implementation": "eager"} if is_text else {}
    model, loading = auto.from_pretrained(folder, output_loading_info=True, **keys)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(inputs)).logits
    faults = {name: sorted(map(str, loading[name])) for name in loading if loading[name]}
    labels = None if is_text else [*model.config.id2label.values()]
    return {
        "logits": logits.tolist(),
        "dtype": str(model.dtype),
        "faults": faults,
        "class": type(model).__name__,
        "labels": labels,
    }


def encode_texts(folder, texts, chats):
    """The ids of texts and chats."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    return {
        "texts": tokenizer(texts)["input_ids"],
        "chats": tokenizer(rows, add_special_tokens=False)["input_ids"] if rows else [],
        "class": type(tokenizer).__name__,
    }


def generate_answer(folder, chat):
    """The new tokens of an answer by the folder's generation_config.json."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    return {"ids": output[0, ids.shape[1] :].tolist()}


def read_pixels(folder, image, automatic):
    """The pixels of an image, by the processor of an Auto class."""
    from PIL import Image

    processor = getattr(transformers, automatic).from_pretrained(folder)
    pixels = processor(images=Image.open(image), return_tensors="pt")["pixel_values"]
    return {"pixels": pixels[0].tolist(), "class": type(processor).__name__}


torch.set_num_threads(1)
print(json.dumps(transformers.__version__), flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    print(json.dumps(globals()[name](**arguments)), flush=True)
