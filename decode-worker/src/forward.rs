//! Forwards a job's events to its client.

use crate::{
    client::ClientStream,
    convert::{self, Output},
    failure::DecodeEnd,
    finishing::FinishingAttempt,
};
use futures::FutureExt;
use tandem_engine::{CachedTokens, Event, TokenLogprobs};
use tandem_proto::v1::{PrefillChunk, Token, Tokens, generate_reply::Message};
use tandem_worker::{Disconnected, Job, Worker};

/// Maximum number of tokens in one message. Tokens accumulate while the client is slow.
const TOKENS_MAX: usize = 256;

/// Forwards all events until the last sample has finished. A slow client delays this task, never the engine.
pub(crate) async fn forward(job: &mut dyn Job, output: Output, client: &ClientStream) -> Result<(), DecodeEnd> {
    let mut answer = ForwardedAnswer::new(output, client);
    while answer.running > 0 {
        // Tokens that are available now are sent in one message. No available token waits for a later token.
        let event = match job.next().now_or_never() {
            Some(event) => event,
            None => {
                answer.flush().await?;
                job.next().await
            }
        };
        answer.forward(event).await?;
    }
    Ok(())
}

/// Like [`forward`], but for an engine that reports the cached tokens late, at worst shortly before the last sample ends. If the client ends the
/// generation earlier, it still receives that report.
pub(crate) async fn forward_late(
    job: &mut dyn Job,
    output: Output,
    client: &ClientStream,
    late: &LateCount<'_>,
) -> Result<(), DecodeEnd> {
    let mut answer = ForwardedAnswer::new(output, client);
    while answer.running > 0 {
        let event = match job.next().now_or_never() {
            Some(event) => event,
            None => {
                answer.flush().await?;
                tokio::select! {
                    biased;
                    event = job.next() => event,
                    () = late.attempt.finish_requested() => return Ok(late.finish(job, client).await?),
                }
            }
        };
        match event {
            Some(Event::Scheduled { cached }) => {
                answer.flush().await?;
                late.send(cached, client).await?;
            }
            event => answer.forward(event).await?,
        }
    }
    Ok(())
}

/// An attempt whose cached tokens the engine reports only at its end.
pub(crate) struct LateCount<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) attempt: FinishingAttempt,
}

impl LateCount<'_> {
    async fn send(&self, cached: Option<CachedTokens>, client: &ClientStream) -> Result<(), Disconnected> {
        client.send(Message::Scheduled(self.worker.scheduled(cached))).await
    }

    /// Cancels the job, and sends the engine's report, unless the engine ends the job without one.
    async fn finish(&self, job: &mut dyn Job, client: &ClientStream) -> Result<(), Disconnected> {
        job.cancel();
        while let Some(event) = job.next().await {
            if let Event::Scheduled { cached } = event {
                return self.send(cached, client).await;
            }
        }
        Ok(())
    }
}

/// An answer that is being forwarded.
struct ForwardedAnswer<'a> {
    client: &'a ClientStream,
    output: Output,
    pending: Pending,
    /// The number of samples that have not finished.
    running: usize,
    /// The logprobs of stop tokens, by sample.
    stops: Vec<(u32, TokenLogprobs)>,
}

impl<'a> ForwardedAnswer<'a> {
    fn new(output: Output, client: &'a ClientStream) -> Self {
        Self { client, running: output.samples, output, pending: Pending::default(), stops: Vec::new() }
    }

    async fn flush(&mut self) -> Result<(), Disconnected> {
        self.pending.flush(self.client).await
    }

    async fn forward(&mut self, event: Option<Event>) -> Result<(), DecodeEnd> {
        match event {
            // A stop token is not part of the output; `Finished` names it.
            Some(Event::Token { sample, token, logprobs }) if self.output.stop_tokens.contains(&token) => {
                self.stops.extend(logprobs.map(|logprobs| (sample, logprobs)));
            }
            Some(Event::Token { sample, token, logprobs }) => {
                self.pending.push(sample, convert::token(token, logprobs));
                if self.pending.len >= TOKENS_MAX {
                    self.flush().await?;
                }
            }
            Some(Event::Finished { sample, reason }) => {
                self.flush().await?;
                let stop = self.stops.iter().position(|(stopped, _)| *stopped == sample).map(|at| self.stops.swap_remove(at).1);
                self.client.send(Message::Finished(convert::finished(sample, reason, stop))).await?;
                self.running -= 1;
            }
            Some(Event::Started(started)) => {
                self.client.send(Message::DecodeStarted(convert::started(&started))).await?;
                let chunks = started.chunks.iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
                self.client.prefilled(chunks.collect()).await?;
            }
            Some(Event::PromptLogprobs(logprobs)) => {
                self.client.send(Message::PromptLogprobs(convert::prompt_logprobs(&self.output.prompt, logprobs))).await?;
            }
            Some(Event::Refused(refusal)) => {
                self.flush().await?;
                return Err(refusal.into());
            }
            // The job has failed, or the engine has ended: no other event can follow `Started`.
            _ => {
                self.flush().await?;
                return Err(DecodeEnd::Engine);
            }
        }
        Ok(())
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
