//! Forwards a job's events to its client.

use crate::{
    client::ClientStream,
    convert::{self, Output},
    failure::DecodeEnd,
    finishing::FinishingAttempt,
};
use futures::FutureExt;
use tandem_engine::Event;
use tandem_proto::v1::{PrefillChunk, Token, Tokens, generate_reply::Message};
use tandem_worker::{Disconnected, Job, Worker};

/// Maximum number of tokens in one message. Tokens accumulate while the client is slow.
const TOKENS_MAX: usize = 256;

/// Forwards all events until the last sample has finished. A slow client delays this task, never the engine.
///
/// If `late` is set, the engine may report the cached tokens as late as shortly before the end of the last sample. The client may request
/// the end of the generation earlier, and still receives that report.
pub(crate) async fn forward(
    job: &mut dyn Job,
    output: Output,
    client: &ClientStream,
    late: Option<LateCount<'_>>,
) -> Result<(), DecodeEnd> {
    let mut tokens = Pending::default();
    let mut running = output.samples;
    let mut finishing = false;
    let mut stops = Vec::new();
    while running > 0 {
        // Tokens that are available now are sent in one message. No available token waits for a later token.
        let event = match job.next().now_or_never() {
            Some(event) => event,
            None => {
                tokens.flush(client).await?;
                tokio::select! {
                    biased;
                    event = job.next() => event,
                    () = finish_requested(&late), if !finishing => {
                        finishing = true;
                        job.cancel();
                        continue;
                    }
                }
            }
        };
        let event = match (event, &late) {
            (Some(Event::Scheduled { cached }), Some(late)) => {
                tokens.flush(client).await?;
                client.send(Message::Scheduled(late.worker.scheduled(cached))).await?;
                if finishing {
                    return Ok(());
                }
                continue;
            }
            // The engine has ended the cancelled request without a report.
            (None, _) if finishing => return Ok(()),
            (Some(_), _) if finishing => continue,
            (event, _) => event,
        };
        match event {
            // A stop token is not part of the output; `Finished` names it.
            Some(Event::Token { sample, token, logprobs }) if output.stop_tokens.contains(&token) => {
                stops.extend(logprobs.map(|logprobs| (sample, logprobs)));
            }
            Some(Event::Token { sample, token, logprobs }) => {
                tokens.push(sample, convert::token(token, logprobs));
                if tokens.len >= TOKENS_MAX {
                    tokens.flush(client).await?;
                }
            }
            Some(Event::Finished { sample, reason }) => {
                tokens.flush(client).await?;
                let stop = stops.iter().position(|(stopped, _)| *stopped == sample).map(|at| stops.swap_remove(at).1);
                client.send(Message::Finished(convert::finished(sample, reason, stop))).await?;
                running -= 1;
            }
            Some(Event::Started(started)) => {
                client.send(Message::DecodeStarted(convert::started(&started))).await?;
                let chunks = started.chunks.iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
                client.prefilled(chunks.collect()).await?;
            }
            Some(Event::PromptLogprobs(logprobs)) => {
                client.send(Message::PromptLogprobs(convert::prompt_logprobs(&output.prompt, logprobs))).await?;
            }
            Some(Event::Refused(refusal)) => {
                tokens.flush(client).await?;
                return Err(refusal.into());
            }
            // The job has failed, or the engine has ended: no other event can follow `Started`.
            _ => {
                tokens.flush(client).await?;
                return Err(DecodeEnd::Engine);
            }
        }
    }
    Ok(())
}

/// An attempt whose cached tokens the engine reports only at its end.
pub(crate) struct LateCount<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) attempt: FinishingAttempt,
}

async fn finish_requested(late: &Option<LateCount<'_>>) {
    match late {
        Some(late) => late.attempt.finish_requested().await,
        None => std::future::pending().await,
    }
}

#[derive(Default)]
struct Pending {
    samples: Vec<Tokens>,
    len: usize,
}

impl Pending {
    fn push(&mut self, sample: u32, token: Token) {
        self.len += 1;
        match self.samples.iter_mut().find(|tokens| tokens.sample == sample) {
            Some(tokens) => tokens.tokens.push(token),
            None => self.samples.push(Tokens { sample, tokens: vec![token] }),
        }
    }

    async fn flush(&mut self, client: &ClientStream) -> Result<(), Disconnected> {
        self.len = 0;
        for tokens in self.samples.drain(..) {
            client.send(Message::Tokens(tokens)).await?;
        }
        Ok(())
    }
}
