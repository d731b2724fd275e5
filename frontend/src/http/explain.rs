//! The reply to a request with the header `x-tandem-explain: true`. In place of an answer it has each prompt's best placement at this time,
//! and the reasons for it.

use super::{app::App, incoming::Job};
use crate::{
    dispatch::{Prompt, placement::Placement},
    error::ApiError,
    prefix::{DetailsReader, PrefixDetails},
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tandem_proto::v1::{Cost, ExplainReply, ExplainedWorker};

/// Requests an explanation of each prompt's placement from a router. No prompt is booked or run.
///
/// # Errors
/// No router answers.
pub(super) async fn explain(app: &App, job: Job) -> Result<Response, ApiError> {
    let mut prompts = Vec::with_capacity(job.prompts.len());
    for (prompt, _) in job.prompts {
        let reply = app.dispatcher.explain(&prompt).await?;
        prompts.push(explained(&prompt, &reply));
    }
    Ok(Json(json!({ "object": "tandem.explanation", "model": job.served.model.id, "prompts": prompts })).into_response())
}

fn explained(prompt: &Prompt, reply: &ExplainReply) -> Value {
    let placement = reply.placement.clone().and_then(Placement::from_wire);
    // The causes assume that the worker finds exactly the expected tokens.
    let prefix = placement.as_ref().and_then(|placement| {
        let expected = placement.prefilling().overlap_blocks.saturating_mul(placement.block_size);
        PrefixDetails::new(placement, prompt.tokens.len() as u32, Some(expected), DetailsReader::Client)
    });
    json!({
        "prompt_tokens": prompt.tokens.len(),
        "block_size": reply.block_size,
        "reusable_blocks": prompt.sequence_hashes.len(),
        "prefill_worker": placement.as_ref().and_then(|placement| Some(&placement.prefill.as_ref()?.worker.worker_id)),
        "decode_worker": placement.as_ref().map(|placement| &placement.decode.worker.worker_id),
        "explanation": reply.explanation,
        "prefix": prefix,
        "workers": reply.workers.iter().map(worker).collect::<Vec<_>>(),
    })
}

fn worker(worker: &ExplainedWorker) -> Value {
    json!({
        "worker": worker.worker.as_ref().map(|worker| worker.worker_id.as_str()),
        "role": worker.role().name(),
        "overlap_blocks": worker.overlap_blocks,
        "overlap_by_tier": worker.overlap_by_tier.iter().collect::<BTreeMap<_, _>>(),
        "predicted_blocks": worker.predicted_blocks,
        "queued_tokens": worker.queued_tokens,
        "sequences": worker.sequences,
        "cache_filled": worker.cache_filled,
        "as_prefill": worker.as_prefill.as_ref().map(cost),
        "as_decode": worker.as_decode.as_ref().map(cost),
        "alone": worker.alone.as_ref().map(cost),
        "transfer_family": worker.transfer_family,
        "unpaired_reason": worker.unpaired_reason,
        "index_note": worker.index_note,
        "approximate_index": worker.approximate_index,
    })
}

fn cost(cost: &Cost) -> Value {
    json!({
        "total_ms": cost.total_ms,
        "queue_ms": cost.queue_ms,
        "compute_ms": cost.compute_ms,
        "load_ms": cost.load_ms,
        "interference_ms": cost.interference_ms,
        "transfer_ms": cost.transfer_ms,
        "handoff_ms": cost.handoff_ms,
        "decode_load_ms": cost.decode_load_ms,
    })
}
