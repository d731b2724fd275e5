//! Byte-level BPE without offsets: it gives the ids of Hugging Face's library, which also records where each token was in the text.

use super::{
    bpe::{Bpe, BpeScratch},
    library::Library,
    spelling::Spelling,
    splitter::Splitter,
};
use std::{borrow::Cow, collections::HashMap, ops::ControlFlow, ops::Range, thread};
use tandem_kv::TokenId;
use tokenizers::{ModelWrapper, NormalizerWrapper, models::bpe::BPE};
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// A text of this many bytes for each thread is encoded by several threads: about 1 ms of work, and twenty times the cost of a thread.
const SECTION_BYTES: usize = 16 << 10;
const THREADS_MAX: usize = 4;
/// The number of bytes for which a thread continues where the next one has begun. Both soon split the text at the same places.
const OVERLAP_BYTES: usize = 512;

pub(super) struct ByteLevel {
    /// Whether a letter and its accents are first composed to one character (NFC).
    composed: bool,
    splitter: Splitter,
    bpe: Bpe,
}

/// The merges of a model, as the library writes them.
#[derive(serde::Deserialize)]
struct Merges {
    merges: Vec<(String, String)>,
}

impl ByteLevel {
    /// Returns the encoder that gives the same ids as the library; `None` if the library's tokenizer is not byte-level BPE, or is unusual.
    pub(super) fn of(library: &Library) -> Option<Self> {
        let composed = match &library.normalizer {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        let ModelWrapper::BPE(model) = &library.model else { return None };
        if library.first != library.later || model.dropout.is_some_and(|dropout| dropout > 0.0) || has_affixes(model) {
            return None;
        }
        let splitter = Splitter::of(library.first.as_ref()?)?;
        Some(Self { composed, splitter, bpe: bpe(model)? })
    }

    /// Appends the ids of a text. Several threads encode a long one.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<TokenId>) {
        let text = if self.composed { compose(text) } else { Cow::Borrowed(text) };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
        let sections = if self.splitter.forgets() { (text.len() / SECTION_BYTES).clamp(1, threads) } else { 1 };
        self.encode_sections(&text, sections, ids);
    }

    pub(super) fn encode_sections(&self, text: &str, sections: usize, ids: &mut Vec<TokenId>) {
        let starts = (0..=sections).map(|section| text.ceil_char_boundary(text.len() * section / sections)).collect::<Vec<_>>();
        let sections: Vec<TextSection> = thread::scope(|scope| {
            let others = starts[1..].windows(2).map(|range| scope.spawn(|| self.section(text, range[0]..range[1])));
            let others: Vec<_> = others.collect();
            let first = self.section(text, 0..starts[1]);
            // A panic of a thread continues here.
            let join = |thread: thread::ScopedJoinHandle<'_, TextSection>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            std::iter::once(first).chain(others.into_iter().map(join)).collect()
        });
        let begin = ids.len();
        let mut from = 0;
        for (at, section) in sections.iter().enumerate() {
            let meets = sections.get(at + 1).map_or(Some((section.ids.len(), 0)), |next| section.meets(next));
            let Some((until, next)) = meets.filter(|(until, _)| *until >= from) else {
                // A part of the text is longer than the overlap.
                ids.truncate(begin);
                ids.extend(self.section(text, 0..text.len()).ids);
                return;
            };
            ids.extend_from_slice(&section.ids[from..until]);
            from = next;
        }
    }

    /// Encodes the text from the start of `range` until [`OVERLAP_BYTES`] after its end.
    fn section(&self, text: &str, range: Range<usize>) -> TextSection {
        let mut section = TextSection { ids: Vec::with_capacity(range.len() / 4), head: Vec::new(), tail: Vec::new() };
        let (mut scratch, mut at) = (BpeScratch::default(), range.start);
        let end = self.splitter.parts(&text[range.start..], &mut |part| {
            let boundary = (at, section.ids.len());
            if at < range.start + OVERLAP_BYTES {
                section.head.push(boundary);
            }
            if at >= range.end {
                section.tail.push(boundary);
                if at >= range.end + OVERLAP_BYTES {
                    return ControlFlow::Break(());
                }
            }
            self.splitter.words(part, &mut |word| self.bpe.encode(word.as_bytes(), &mut scratch, &mut section.ids));
            at += part.len();
            ControlFlow::Continue(())
        });
        if end.is_continue() {
            section.tail.push((at, section.ids.len()));
        }
        section
    }
}

/// A section of a text that one thread has encoded. It begins anywhere, perhaps within a word.
struct TextSection {
    ids: Vec<TokenId>,
    /// The places between parts near the section's start: the offset in the text, and the number of ids before it.
    head: Vec<(usize, usize)>,
    /// The places between parts from the section's end on.
    tail: Vec<(usize, usize)>,
}

impl TextSection {
    /// Returns how many ids this section and the next one have before the first place at which both split the text. From there on both split it
    /// in the same way.
    fn meets(&self, next: &Self) -> Option<(usize, usize)> {
        self.tail.iter().find_map(|(at, ids)| next.head.iter().find(|(other, _)| other == at).map(|(_, next)| (*ids, *next)))
    }
}

fn has_affixes(model: &BPE) -> bool {
    let is_set = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    is_set(&model.continuing_subword_prefix) || is_set(&model.end_of_word_suffix)
}

fn bpe(model: &BPE) -> Option<Bpe> {
    let ids: HashMap<String, TokenId> = model.get_vocab();
    let Merges { merges } = serde_json::to_vec(model).and_then(|json| serde_json::from_slice(&json)).ok()?;
    let merges = merges.iter().map(|(left, right)| {
        let id = |text: &str| ids.get(text).copied();
        Some(((id(left)?, id(right)?), id(&format!("{left}{right}"))?))
    });
    let merges = merges.collect::<Option<Vec<_>>>()?;
    let spelling = Spelling::byte_level();
    let words = ids.iter().filter_map(|(text, id)| Some((spelling.visible_bytes(text)?.into(), *id)));
    let bpe = Bpe::new(words, merges.into_iter(), model.ignore_merges);
    // Many vocabularies lack bytes that were rare in their training data. The library leaves such a byte out, or has a token for it.
    let leaves_out = model.unk_token.is_none() && !model.byte_fallback;
    (leaves_out || bpe.has_all_bytes()).then_some(bpe)
}

/// Composes the characters of a text (NFC), with the tables that the library has.
fn compose(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) {
        return Cow::Borrowed(text);
    }
    text.nfc().map(|(char, _)| char).collect::<String>().into()
}
