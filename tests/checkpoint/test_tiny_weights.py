"""Do the weights show what an engine does wrong? Asked of transformers, a second implementation of glm5_next in torch.

The reference loads the checkpoint from disk and runs in BF16 on the CPU. Every effect is measured in log-probabilities
of printable tokens along one text, and set against what BF16 rounding of the attention output does to them.
"""

import json

import pytest
import torch
from safetensors import safe_open

from overlay.checkpoint import tiny
from overlay.checkpoint.tiny_config import TinyModel
from overlay.checkpoint.tiny_weights import PRINTABLE, expert_pair

MODEL = TinyModel(nested=True, mtp=True)
PROMPT = b"[gMASK]<sop>A latent row holds what every head needs of one token. Attention reads the rows it was told to."
NEW_TOKENS = 64
SPARSE_LAYER, MTP_LAYER = 3, 4


class Reference:
    """The reference model, one greedy generation, and its log-probabilities along prompt and generation."""

    def __init__(self, folder):
        from transformers.models.glm5_next import modeling_glm5_next as glm

        self.glm, self.folder = glm, folder
        tiny.write(MODEL, folder)
        self.model, self.loading = glm.Glm5NextForConditionalGeneration.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
        )
        self.model.eval()
        self.text = self.model.model.language_model
        prompt = torch.tensor([list(PROMPT)])
        done = self.model.generate(
            input_ids=prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        self.tokens = done.sequences
        self.generated = self.tokens[0, len(PROMPT) :].tolist()
        self.scores = torch.cat(done.scores).float()
        self.plain = self.logprobs()

    def logprobs(self):
        """[tokens, printable]."""
        return self.model(input_ids=self.tokens).logits[0].float().log_softmax(-1)[:, PRINTABLE]

    def with_changed(self, module, change):
        """Log-probabilities while `change` is applied to the output of `module`."""

        def hook(_module, _arguments, output):
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        handle = module.register_forward_hook(hook)
        try:
            return self.logprobs()
        finally:
            handle.remove()

    def effect(self, module, change):
        """Mean change of the log-probability of the token that was the most probable one."""
        best = self.plain.argmax(-1, keepdim=True)
        return (self.with_changed(module, change) - self.plain).gather(1, best).abs().mean().item()

    def tensors(self, prefix):
        """The checkpoint's own tensors whose names start with `prefix`, without it."""
        found = {}
        for name, file in json.loads((self.folder / "model.safetensors.index.json").read_text())["weight_map"].items():
            if name.startswith(prefix):
                with safe_open(self.folder / file, "pt") as shard:
                    found[name.removeprefix(prefix)] = shard.get_tensor(name)
        return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    with torch.no_grad():
        yield Reference(tmp_path_factory.mktemp("tiny") / "model")


def rounded_differently(output):
    """The output of another kernel for the same thing: off by BF16's rounding error, 2^-9."""
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return (output.float() * (1 + noise * 2**-9)).to(output.dtype)


@pytest.fixture(scope="module")
def noise(reference):
    return reference.effect(reference.text.layers[SPARSE_LAYER].self_attn, rounded_differently)


def test_transformers_finds_every_tensor_it_knows(reference):
    assert reference.loading["missing_keys"] == set()
    assert reference.loading["mismatched_keys"] == set()
    draft = f"model.language_model.layers.{MTP_LAYER}."
    assert all(name.startswith(draft) for name in reference.loading["unexpected_keys"])


def test_bf16_noise_stays_small(noise):
    assert 0 < noise < 0.01


BROKEN = {
    "attention returns zeros": ("self_attn", lambda x: x * 0, 0.15),
    "attention is half as large": ("self_attn", lambda x: x * 0.5, 0.08),
    "attention rows belong to the previous token": ("self_attn", lambda x: x.roll(1, dims=-2), 0.15),
    "experts return zeros": ("mlp.experts", lambda x: x * 0, 0.15),
    "experts are 20 % too large": ("mlp.experts", lambda x: x * 1.2, 0.03),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_layer_shows_far_above_the_noise(reference, noise, what):
    name, change, least = BROKEN[what]
    effect = reference.effect(reference.text.layers[SPARSE_LAYER].get_submodule(name), change)
    assert effect > least
    assert effect > 10 * noise


def off_by_one(rows):
    return torch.where(rows > 0, rows - 1, rows)


def without_newest(rows):
    """Index rows that lost the incomplete pool, which is always selected: up to three tokens, the newest."""
    complete = (torch.arange(rows.shape[1]) + 1) // 4 * 4
    return torch.where(rows >= complete.view(1, -1, 1), -1, rows)


def one_in_ten_lost(rows):
    lost = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    return torch.where(lost, -1, rows)


@pytest.mark.parametrize("change", [off_by_one, without_newest, one_in_ten_lost])
def test_wrong_index_rows_show_far_above_the_noise(reference, noise, change):
    effect = reference.effect(reference.text.layers[SPARSE_LAYER].self_attn.indexer, change)
    assert effect > 0.03
    assert effect > 10 * noise


def test_attention_weights_are_concentrated(reference):
    """Half of a row's weight lies on few tokens: one that is lost is missed."""
    attention = reference.text.layers[SPARSE_LAYER].self_attn
    weights = []
    handle = attention.register_forward_hook(lambda _module, _arguments, output: weights.append(output[1]))
    reference.logprobs()
    handle.remove()
    last = weights[0][0, :, -1].float()  # [heads, context]
    assert last.shape[1] > 150
    assert last.topk(8).values.sum(-1).mean() > 0.5
    assert last.argmax(-1).unique().numel() > MODEL.heads // 2, "every head looks at another place"


def routes(reference):
    """By layer of experts: the router's scores [tokens, experts], the weights and the ids it gave [tokens, chosen]."""
    seen = {}
    gates = {layer: reference.text.layers[layer].mlp.gate for layer in range(1, MODEL.layers)}
    handles = [
        gate.register_forward_hook(lambda _module, _arguments, output, layer=layer: seen.update({layer: output}))
        for layer, gate in gates.items()
    ]
    reference.logprobs()
    for handle in handles:
        handle.remove()
    return {layer: (gates[layer].e_score_correction_bias + s.sigmoid(), *rest) for layer, (s, *rest) in seen.items()}


def test_routing_follows_the_token_whatever_the_context(reference):
    for layer, (_scores, weights, chosen) in routes(reference).items():
        for token, experts in zip(reference.tokens[0].tolist(), chosen.tolist(), strict=True):
            assert set(experts) == {(expert + layer) % MODEL.experts for expert in expert_pair(token, MODEL)}
        assert weights.std() > 0.005, "the expert weights ignore the context"


def test_no_rounding_error_changes_a_route(reference):
    """Two engines whose kernels round differently send every token to the same experts, by a wide margin."""
    plain = routes(reference)
    blocks = [block for layer in reference.text.layers for block in (layer.self_attn, layer.mlp)]
    handles = [
        block.register_forward_hook(
            lambda _module, _arguments, output: (
                (rounded_differently(output[0]), *output[1:])
                if isinstance(output, tuple)
                else rounded_differently(output)
            )
        )
        for block in blocks
    ]
    noisy = routes(reference)
    for handle in handles:
        handle.remove()
    for layer, (scores, _weights, _chosen) in plain.items():
        ordered = scores.sort(-1, descending=True).values
        gap = ordered[:, MODEL.experts_per_token - 1] - ordered[:, MODEL.experts_per_token]
        change = (noisy[layer][0] - scores).abs().max()
        assert change > 0
        assert gap.min() > 10 * change, f"layer {layer}: {gap.min()} is not far above {change}"


def test_a_dead_expert_spoils_its_own_tokens_only(reference):
    """In the last layer, where nothing downstream carries the damage on."""
    experts = reference.text.layers[SPARSE_LAYER].mlp.experts
    kept = experts.down_proj[2].clone()
    experts.down_proj[2] = 0
    change = (reference.logprobs() - reference.plain).abs().amax(-1)
    experts.down_proj[2] = kept
    hit = torch.tensor(
        [
            2 in {(e + SPARSE_LAYER) % MODEL.experts for e in expert_pair(token, MODEL)}
            for token in reference.tokens[0].tolist()
        ]
    )
    assert 0.1 < hit.float().mean() < 0.4
    assert change[hit].min() > 0.1
    assert change[~hit].max() == 0


def test_greedy_text_is_readable_and_does_not_get_stuck(reference):
    assert set(reference.generated) <= set(PRINTABLE)
    assert len(set(reference.generated)) >= 20
    runs = [len(set(reference.generated[i : i + 4])) for i in range(NEW_TOKENS - 3)]
    assert min(runs) > 1, "one token repeated"
    assert len({tuple(reference.generated[i : i + 4]) for i in range(NEW_TOKENS - 3)}) > NEW_TOKENS // 2


def test_most_steps_are_decided_by_more_than_noise(reference, noise):
    best, second = reference.scores.topk(2, dim=-1).values.unbind(-1)
    margin = best - second
    assert best.max() < 4, "BF16 logits are 1/64 apart below 4 and 1/32 above"
    assert margin.median() > 0.15
    assert (margin > 8 * noise).float().mean() > 0.8


def test_the_draft_layer_often_agrees_with_the_target(reference):
    """A speculating engine accepts some drafts and rejects some. The draft layer is put together from the parts."""
    glm, config = reference.glm, reference.text.config
    weight = reference.tensors(f"model.language_model.layers.{MTP_LAYER}.")
    attention, mixture = glm.Glm5NextTextAttention(config, SPARSE_LAYER), glm.Glm5NextTextMoE(config)
    attention.load_state_dict(part(weight, "self_attn."))
    mixture.load_state_dict(merged_experts(part(weight, "mlp.")))
    attention, mixture = attention.bfloat16(), mixture.bfloat16()

    def norm(name, x):
        x = x.float()
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return (weight[name + ".weight"].float() * scaled).bfloat16()

    hidden = reference.model.model(input_ids=reference.tokens).last_hidden_state
    embedded = reference.text.embed_tokens(reference.tokens[:, 1:])
    both = torch.cat((norm("enorm", embedded), norm("hnorm", hidden[:, :-1])), -1)
    x = both @ weight["eh_proj.weight"].T
    seen = torch.ones(x.shape[:2], dtype=torch.bool)
    x = x + attention(norm("input_layernorm", x), attention_mask=seen)[0]
    x = x + mixture(norm("post_attention_layernorm", x))
    draft = reference.model.lm_head(norm("shared_head.norm", x)).argmax(-1)[0, len(PROMPT) - 1 :]
    target = reference.model.lm_head(hidden[:, 1:]).argmax(-1)[0, len(PROMPT) - 1 :]
    assert 0.15 < (draft == target).float().mean() < 0.85


def part(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def merged_experts(tensors):
    """One tensor for all experts' gate and up, one for their down, as transformers holds them."""
    merged = {name: tensor for name, tensor in tensors.items() if not name.startswith("experts.")}
    names = [f"experts.{expert}." for expert in range(MODEL.experts)]
    halves = [torch.cat((tensors[n + "gate_proj.weight"], tensors[n + "up_proj.weight"])) for n in names]
    merged["experts.gate_up_proj"] = torch.stack(halves)
    merged["experts.down_proj"] = torch.stack([tensors[n + "down_proj.weight"] for n in names])
    return merged
