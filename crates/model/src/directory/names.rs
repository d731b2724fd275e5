//! Translates tensor names from those of GGUF, which the engine uses, to those of Hugging Face.

/// Returns the name in safetensors files of the tensor that GGUF files call `name`: for example `model.layers.3.self_attn.q_proj.weight`
/// for `blk.3.attn_q.weight`. A name that has no counterpart is returned unchanged.
pub(super) fn in_safetensors(name: &str) -> String {
    let whole = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(whole) = whole {
        return whole.to_owned();
    }
    let parts = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((layer, (part, end))) = parts.and_then(|(layer, rest)| Some((layer, rest.rsplit_once('.')?))) else {
        return name.to_owned();
    };
    let part = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return name.to_owned(),
    };
    format!("model.layers.{layer}.{part}.{end}")
}
