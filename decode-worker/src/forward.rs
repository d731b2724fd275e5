//! Forwards a job's events to its client.

use crate::{
    client::Client,
    convert::{self, Output},
    failure::Ended,
};
use futures::FutureExt;
use tandem_engine::Event;
use tandem_proto::v1::{PrefillChunk, Token, Tokens, generate_reply::Message};
use tandem_worker::{Disconnected, Job};

/// Tokens in one message: as many as a slow client receives at a time.
const TOKENS_MAX: usize = 256;

/// Forwards all events until the last sample has finished. A slow client delays this task, never the engine.
pub(crate) async fn forward(job: &mut dyn Job, output: Output, client: &Client) -> Result<(), Ended> {
    let mut tokens = Pending::default();
    let mut running = output.samples;
    while running > 0 {
        // Tokens that are available together are sent together; no token waits for another.
        let event = match job.next().now_or_never() {
            Some(event) => event,
            None => {
                tokens.flush(client).await?;
                job.next().await
            }
        };
        match event {
            // A stop token is no output; `Finished` names it.
            Some(Event::Token { token, .. }) if output.stop_tokens.contains(&token) => {}
            Some(Event::Token { sample, token, logprobs }) => {
                tokens.push(sample, convert::token(token, logprobs));
                if tokens.len >= TOKENS_MAX {
                    tokens.flush(client).await?;
                }
            }
            Some(Event::Finished { sample, reason }) => {
                tokens.flush(client).await?;
                client.send(Message::Finished(convert::finished(sample, reason))).await?;
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
            // `Failed`, or the engine has ended; no other events follow `Started`.
            _ => {
                tokens.flush(client).await?;
                return Err(Ended::Engine);
            }
        }
    }
    Ok(())
}

/// Tokens not sent yet, by sample.
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

    async fn flush(&mut self, client: &Client) -> Result<(), Disconnected> {
        self.len = 0;
        for tokens in self.samples.drain(..) {
            client.send(Message::Tokens(tokens)).await?;
        }
        Ok(())
    }
}
