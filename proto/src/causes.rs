//! Why the tokens of a prompt were not found in a prefix cache: exactly one cause for each token (docs/adr/051-why-not-cached.md).

use crate::v1::{KnownPrefix, PrefixFacts};

/// Why tokens of a prompt were not found. If several causes apply, the first one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The worker's engine found less than was expected of it.
    Engine,
    /// The worker reports the blocks, but its engine cannot reuse them: they end between two reuse points of its layers, or it always drops them.
    GroupRule,
    /// Another prompt computes the blocks at the same time, or has computed them without a report so far.
    NotYetStored,
    /// Another worker has the blocks cached.
    HeldElsewhere,
    /// A worker had the blocks cached, and has removed them or left.
    Evicted,
    /// A recent prompt in another cache namespace begins with the same blocks.
    OtherNamespace,
    /// No worker is known to have had the blocks.
    NewText,
    /// No block with these tokens can be reused: tokens after the last full block, the last token, or a prompt whose logits are requested.
    BelowBlock,
}

impl Cause {
    /// All causes, in the order of their declaration.
    pub const ALL: [Self; 8] = [
        Self::Engine,
        Self::GroupRule,
        Self::NotYetStored,
        Self::HeldElsewhere,
        Self::Evicted,
        Self::OtherNamespace,
        Self::NewText,
        Self::BelowBlock,
    ];

    /// Returns the cause's name in metrics and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::GroupRule => "group_rule",
            Self::NotYetStored => "not_yet_stored",
            Self::HeldElsewhere => "held_elsewhere",
            Self::Evicted => "evicted",
            Self::OtherNamespace => "other_namespace",
            Self::NewText => "new_text",
            Self::BelowBlock => "below_block",
        }
    }
}

/// The tokens that were not found, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Causes([u64; Cause::ALL.len()]);

impl Causes {
    /// Returns the causes of one prompt, of which `found_tokens` were cached. Together with these they are all `prompt_tokens`.
    pub fn of(facts: &PrefixFacts, prompt_tokens: u32, block_size: u32, found_tokens: u32) -> Self {
        let blocks_of = |known: &Option<KnownPrefix>| known.as_ref().map_or(0, |known| known.blocks);
        let leading_blocks = [
            (Cause::Engine, facts.expected_blocks),
            (Cause::GroupRule, facts.held_blocks),
            (Cause::NotYetStored, facts.known_blocks),
            (Cause::HeldElsewhere, blocks_of(&facts.anywhere)),
            (Cause::NotYetStored, facts.in_flight_blocks),
            (Cause::Evicted, blocks_of(&facts.removed)),
            (Cause::OtherNamespace, facts.other_namespace_blocks),
            (Cause::NewText, facts.reusable_blocks),
        ];
        let (mut causes, mut explained) = (Self::default(), found_tokens.min(prompt_tokens));
        for (cause, blocks) in leading_blocks {
            let end = blocks.min(facts.reusable_blocks).saturating_mul(block_size).min(prompt_tokens);
            causes.0[cause as usize] += u64::from(end.saturating_sub(explained));
            explained = explained.max(end);
        }
        causes.0[Cause::BelowBlock as usize] += u64::from(prompt_tokens - explained);
        causes
    }

    /// Returns the tokens with this cause.
    pub fn tokens(&self, cause: Cause) -> u64 {
        self.0[cause as usize]
    }

    /// Returns the tokens of each cause that has some.
    pub fn iter(&self) -> impl Iterator<Item = (Cause, u64)> {
        Cause::ALL.into_iter().zip(self.0).filter(|(_, tokens)| *tokens > 0)
    }

    /// Returns the causes as a client may see them. Whether another account has sent the same text is not shown to it.
    #[must_use]
    pub fn within_namespace(mut self) -> Self {
        let hidden = std::mem::take(&mut self.0[Cause::OtherNamespace as usize]);
        self.0[Cause::NewText as usize] += hidden;
        self
    }
}

impl std::ops::AddAssign for Causes {
    fn add_assign(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, tokens)| *sum = sum.saturating_add(tokens));
    }
}

/// How many tokens of prompts could have been cached, were predicted to be, and were found. Sums over prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Funnel {
    /// Tokens of the prompts.
    pub prompt: u64,
    /// Tokens that the worker with the most cached blocks of the prompt had, or that were found.
    pub possible: u64,
    /// As `possible`, but only workers that could have computed the prompt count.
    pub eligible: u64,
    /// Tokens that the chosen worker's engine was expected to find.
    pub chosen: u64,
    /// Tokens that the engine found.
    pub found: u64,
    /// Tokens that were not found.
    pub causes: Causes,
}

impl Funnel {
    /// Returns the funnel of one prompt, of which `found_tokens` were cached.
    pub fn of(facts: &PrefixFacts, prompt_tokens: u32, block_size: u32, found_tokens: u32) -> Self {
        let tokens = |blocks: u32| u64::from(blocks.saturating_mul(block_size).min(prompt_tokens));
        let blocks = |known: &Option<KnownPrefix>| known.as_ref().map_or(0, |known| known.blocks);
        let found = found_tokens.min(prompt_tokens).into();
        let eligible = tokens(blocks(&facts.eligible)).max(found);
        Self {
            prompt: prompt_tokens.into(),
            possible: tokens(blocks(&facts.anywhere)).max(eligible),
            eligible,
            chosen: tokens(facts.expected_blocks),
            found,
            causes: Causes::of(facts, prompt_tokens, block_size, found_tokens),
        }
    }
}

impl std::ops::AddAssign for Funnel {
    fn add_assign(&mut self, other: Self) {
        let Self { prompt, possible, eligible, chosen, found, causes } = other;
        self.prompt = self.prompt.saturating_add(prompt);
        self.possible = self.possible.saturating_add(possible);
        self.eligible = self.eligible.saturating_add(eligible);
        self.chosen = self.chosen.saturating_add(chosen);
        self.found = self.found.saturating_add(found);
        self.causes += causes;
    }
}

impl PrefixFacts {
    /// Returns how many leading blocks of the prompt some worker in this namespace is known to have or to have had, or to be about to compute. The
    /// text after them is new.
    pub fn known_prefix(&self) -> u32 {
        let known = |known: &Option<KnownPrefix>| known.as_ref().map_or(0, |known| known.blocks);
        let (held, other) = (self.held_blocks.max(self.known_blocks), known(&self.anywhere).max(known(&self.removed)));
        held.max(other).max(self.expected_blocks).max(self.in_flight_blocks).min(self.reusable_blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the cause of one token, from the definition of each cause.
    fn cause_of(facts: &PrefixFacts, token: u32, block_size: u32) -> Cause {
        let is_in = |blocks: u32| token / block_size < blocks;
        let is_known = |known: &Option<KnownPrefix>| known.as_ref().is_some_and(|known| is_in(known.blocks));
        match () {
            () if !is_in(facts.reusable_blocks) => Cause::BelowBlock,
            () if is_in(facts.expected_blocks) => Cause::Engine,
            () if is_in(facts.held_blocks) => Cause::GroupRule,
            () if is_in(facts.known_blocks) => Cause::NotYetStored,
            () if is_known(&facts.anywhere) => Cause::HeldElsewhere,
            () if is_in(facts.in_flight_blocks) => Cause::NotYetStored,
            () if is_known(&facts.removed) => Cause::Evicted,
            () if is_in(facts.other_namespace_blocks) => Cause::OtherNamespace,
            () => Cause::NewText,
        }
    }

    fn facts() -> impl Strategy<Value = PrefixFacts> {
        let known = || prop::option::of((0..30_u32).prop_map(|blocks| KnownPrefix { blocks, ..Default::default() }));
        ([0..30_u32, 0..30, 0..30, 0..30, 0..30, 0..30], known(), known()).prop_map(|(blocks, anywhere, removed)| PrefixFacts {
            reusable_blocks: blocks[0],
            expected_blocks: blocks[1],
            held_blocks: blocks[2],
            known_blocks: blocks[3],
            eligible: None,
            anywhere,
            in_flight_blocks: blocks[4],
            removed,
            other_namespace_blocks: blocks[5],
        })
    }

    proptest! {
        #[test]
        fn each_token_that_was_not_found_has_the_first_cause_that_applies(
            facts in facts(), rest in 1..40_u32, block_size in 1..20_u32, found in 0..700_u32
        ) {
            let prompt_tokens = facts.reusable_blocks * block_size + rest;
            let causes = Causes::of(&facts, prompt_tokens, block_size, found);
            let mut naive = Causes::default();
            (found..prompt_tokens).for_each(|token| naive.0[cause_of(&facts, token, block_size) as usize] += 1);
            prop_assert_eq!(causes, naive);
        }

        #[test]
        fn causes_and_found_tokens_are_the_prompt_whatever_a_router_sends(
            facts in facts(), scale in 1..u32::MAX, prompt_tokens: u32, block_size: u32, found: u32
        ) {
            let facts = PrefixFacts { held_blocks: facts.held_blocks.wrapping_mul(scale), reusable_blocks: scale, ..facts };
            let causes = Causes::of(&facts, prompt_tokens, block_size, found);
            let sum: u64 = causes.iter().map(|(_, tokens)| tokens).sum();
            prop_assert_eq!(sum + u64::from(found.min(prompt_tokens)), u64::from(prompt_tokens));
            prop_assert_eq!(causes.within_namespace().iter().map(|(_, tokens)| tokens).sum::<u64>(), sum);
        }
    }
}
