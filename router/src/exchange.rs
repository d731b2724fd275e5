//! What routers tell each other of their bookings: all of them first, then every change, numbered without gaps.
//!
//! Pure, and apart from how the messages travel. A change is a booking as it is now, or its end: to hear it twice, or late in
//! one with a later change, does no harm. What a message covers is told by numbers of the sender's journal, so that whoever
//! loses one notices at the next, and asks for all of them again.

use crate::booked::{BookingId, Share};
use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};
use tandem_kv::SequenceHash;
use tandem_proto::{
    WireError,
    v1::{BookedLoad, BookedRequest, BookingChange, BookingChanges, BookingState, BookingsReply, bookings_reply::Message},
};
use tokio::sync::watch;

/// Changes that can be told one by one; who is further behind gets all bookings instead. Half a megabyte, and a minute of 300
/// requests a second.
const RECENT_MAX: usize = 65_536;
/// Bookings of one message.
const MESSAGE_BOOKINGS_MAX: usize = 1_024;
/// Hashes of one message, and those of a last booking: about half a megabyte.
const MESSAGE_HASHES_MAX: usize = 65_536;
/// Hashes that are told of one booking: 65,536 tokens in blocks of 16. What is predicted of longer prompts ends there.
pub(crate) const HASHES_MAX: usize = 4_096;

/// Numbers the changes of this router's bookings, and remembers the latest.
pub(crate) struct Journal {
    last: watch::Sender<u64>,
    recent: VecDeque<BookingId>,
}

impl Default for Journal {
    fn default() -> Self {
        Self { last: watch::Sender::new(0), recent: VecDeque::new() }
    }
}

impl Journal {
    /// A booking was made, has changed or has ended.
    pub(crate) fn note(&mut self, booking: BookingId) {
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(booking);
        self.last.send_modify(|last| *last += 1);
    }

    /// The last change's number.
    pub(crate) fn last(&self) -> u64 {
        *self.last.borrow()
    }

    /// Tells of every new number.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// What has changed after this number; `None` if that is too long ago.
    pub(crate) fn since(&self, after: u64) -> Option<impl Iterator<Item = BookingId>> {
        let missed = usize::try_from(self.last().checked_sub(after)?).ok()?;
        let first = self.recent.len().checked_sub(missed)?;
        Some(self.recent.range(first..).copied())
    }
}

/// A booking as other routers hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) request_id: Arc<str>,
    pub(crate) decode: (Arc<str>, Share),
    /// Never the instance that decodes.
    pub(crate) prefill: Option<(Arc<str>, Share)>,
    pub(crate) computing: bool,
    /// At most [`HASHES_MAX`]; none unless it is computing.
    pub(crate) hashes: Arc<[SequenceHash]>,
}

/// A booking by its sender's number; `None`: it has ended.
pub(crate) type Change = (u64, Option<Told>);

/// What one message is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// A part of all bookings.
    State { at: u64, bookings: Vec<Change>, last: bool },
    /// What has changed after `after`, up to `last`.
    Changes { after: u64, last: u64, bookings: Vec<Change> },
}

/// All bookings, in messages of bounded size.
pub(crate) fn state(at: u64, bookings: impl Iterator<Item = (BookingId, Told)>) -> Vec<News> {
    let (mut news, mut part) = (Vec::new(), Part::default());
    for (id, told) in bookings {
        if part.is_full() {
            news.push(News::State { at, bookings: std::mem::take(&mut part).changes, last: false });
        }
        part.push(id, Some(told));
    }
    news.push(News::State { at, bookings: part.changes, last: true });
    news
}

/// The changes after this number, in messages of bounded size; one without any if there is none.
pub(crate) fn changes(
    mut after: u64,
    changed: impl Iterator<Item = BookingId>,
    now: impl Fn(BookingId) -> Option<Told>,
) -> Vec<News> {
    let (mut news, mut part, mut last) = (Vec::new(), Part::default(), after);
    for id in changed {
        if part.is_full() {
            news.push(News::Changes { after, last, bookings: std::mem::take(&mut part).changes });
            after = last;
        }
        last += 1;
        if part.seen.insert(id) {
            part.push(id, now(id));
        }
    }
    news.push(News::Changes { after, last, bookings: part.changes });
    news
}

#[derive(Default)]
struct Part {
    changes: Vec<Change>,
    seen: HashSet<BookingId>,
    hashes: usize,
}

impl Part {
    fn is_full(&self) -> bool {
        self.changes.len() >= MESSAGE_BOOKINGS_MAX || self.hashes >= MESSAGE_HASHES_MAX
    }

    fn push(&mut self, id: BookingId, told: Option<Told>) {
        self.hashes += told.as_ref().map_or(0, |told| told.hashes.len());
        self.changes.push((id.0, told));
    }
}

/// The message, from the router of this instance.
pub(crate) fn encode(router_instance_id: &str, news: News) -> BookingsReply {
    let all = |bookings: Vec<Change>| {
        bookings.into_iter().map(|(booking_id, told)| BookingChange { booking_id, request: told.map(Into::into) }).collect()
    };
    let message = match news {
        News::State { at, bookings, last } => Message::State(BookingState { at_change_id: at, bookings: all(bookings), last }),
        News::Changes { after, last, bookings } => {
            Message::Changes(BookingChanges { after, last_change_id: last, bookings: all(bookings) })
        }
    };
    BookingsReply { router_instance_id: router_instance_id.to_owned(), message: Some(message) }
}

impl From<Told> for BookedRequest {
    fn from(told: Told) -> Self {
        let share = |(instance_id, Share { tokens, sequences }): (Arc<str>, Share)| BookedLoad {
            instance_id: instance_id.to_string(),
            tokens,
            sequences,
        };
        Self {
            request_id: told.request_id.to_string(),
            decode: Some(share(told.decode)),
            prefill: told.prefill.map(share),
            prefilling: told.computing,
            sequence_hashes: told.hashes.iter().map(|hash| hash.0).collect(),
        }
    }
}

impl TryFrom<BookedRequest> for Told {
    type Error = WireError;

    fn try_from(placed: BookedRequest) -> Result<Self, WireError> {
        let share = |BookedLoad { instance_id, tokens, sequences }| (Arc::<str>::from(instance_id), Share { tokens, sequences });
        let decode = share(placed.decode.ok_or(WireError::Missing { field: "decode" })?);
        let hashes = if placed.prefilling { placed.sequence_hashes } else { Vec::new() };
        Ok(Self {
            request_id: placed.request_id.into(),
            prefill: placed.prefill.map(share).filter(|(instance_id, _)| *instance_id != decode.0),
            decode,
            computing: placed.prefilling,
            hashes: hashes.into_iter().take(HASHES_MAX).map(SequenceHash).collect(),
        })
    }
}

/// What to do about a message.
#[derive(Debug, PartialEq)]
pub(crate) enum Heard {
    /// Nothing.
    Nothing,
    /// These are all.
    All(Vec<Change>),
    /// These have changed.
    Changed(Vec<Change>),
}

/// Why a router cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("changes after {applied} are missing")]
    Gap { applied: u64 },
    #[error("it speaks for another instance than before")]
    OtherInstance,
    #[error("it has more than {max} bookings")]
    TooMany { max: usize },
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// One router's messages, put in order.
pub(crate) struct Intake {
    bookings_max: usize,
    instance_id: Option<String>,
    /// The parts of a state that is not whole yet.
    parts: Vec<Change>,
    /// The last change that is known; `None` before the first state.
    applied: Option<u64>,
}

impl Intake {
    pub(crate) fn new(bookings_max: usize) -> Self {
        Self { bookings_max, instance_id: None, parts: Vec::new(), applied: None }
    }

    /// Who speaks, once it has.
    pub(crate) fn instance_id(&self) -> Option<&str> {
        self.instance_id.as_deref()
    }

    /// Takes the next message.
    pub(crate) fn take(&mut self, reply: BookingsReply) -> Result<Heard, Broken> {
        let BookingsReply { router_instance_id, message } = reply;
        if *self.instance_id.get_or_insert_with(|| router_instance_id.clone()) != router_instance_id {
            return Err(Broken::OtherInstance);
        }
        match message.ok_or(WireError::Missing { field: "message" })? {
            Message::State(BookingState { at_change_id, bookings, last }) => {
                self.parts.append(&mut decoded(bookings)?);
                if self.parts.len() > self.bookings_max {
                    return Err(Broken::TooMany { max: self.bookings_max });
                }
                if !last {
                    return Ok(Heard::Nothing);
                }
                self.applied = Some(at_change_id);
                Ok(Heard::All(std::mem::take(&mut self.parts)))
            }
            Message::Changes(BookingChanges { after, last_change_id, bookings }) => {
                // What was told before the state is in it, or the gap after it shows that it is not.
                let Some(applied) = self.applied else { return Ok(Heard::Nothing) };
                if after > applied {
                    return Err(Broken::Gap { applied });
                }
                if last_change_id <= applied {
                    return Ok(Heard::Nothing);
                }
                self.applied = Some(last_change_id);
                Ok(Heard::Changed(decoded(bookings)?))
            }
        }
    }
}

fn decoded(bookings: Vec<BookingChange>) -> Result<Vec<Change>, WireError> {
    let change = |BookingChange { booking_id, request }| Ok((booking_id, request.map(Told::try_from).transpose()?));
    bookings.into_iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(hashes: usize) -> Told {
        let share = |name: &str| (name.into(), Share { tokens: 3, sequences: 2 });
        let hashes = (0..hashes as u64).map(SequenceHash).collect();
        Told { request_id: "r".into(), decode: share("d"), prefill: Some(share("p")), computing: true, hashes }
    }

    fn all_taken(news: Vec<News>) -> Vec<Heard> {
        let mut intake = Intake::new(10_000);
        let first = encode("i", News::State { at: 0, bookings: vec![], last: true });
        assert_eq!(intake.take(first), Ok(Heard::All(vec![])));
        news.into_iter().map(|news| intake.take(encode("i", news)).expect("they are in order")).collect()
    }

    #[test]
    fn the_journal_forgets_and_says_so() {
        let mut journal = Journal::default();
        let since = |journal: &Journal, after| journal.since(after).map(|ids| ids.map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(since(&journal, 0), Some(vec![]));
        (1..=RECENT_MAX as u64).for_each(|id| journal.note(BookingId(id)));
        assert_eq!(since(&journal, 0).map(|ids| ids.len()), Some(RECENT_MAX));
        journal.note(BookingId(7));
        assert_eq!(since(&journal, 0), None);
        assert_eq!(since(&journal, journal.last() - 2), Some(vec![RECENT_MAX as u64, 7]));
        assert_eq!(since(&journal, journal.last() + 1), None, "that is another journal's");
    }

    #[test]
    fn long_news_goes_in_parts_without_a_gap_and_twice_changed_is_told_once() {
        let ids: Vec<BookingId> = (0..3_000).map(|at| BookingId(at / 2)).collect();
        let news = changes(0, ids.iter().copied(), |id| id.0.is_multiple_of(2).then(|| told(1)));
        assert_eq!(news.len(), 2);
        let heard = all_taken(news);
        let changed = heard.iter().map(|heard| match heard {
            Heard::Changed(changes) => changes.len(),
            other => panic!("{other:?}"),
        });
        assert_eq!(changed.sum::<usize>(), 1_500 + 1, "once, but for the one at the seam");
        // Prompts as long as can be told: 16 fill a message.
        let parts = changes(0, ids[..100].iter().copied(), |_| Some(told(HASHES_MAX)));
        assert_eq!(parts.len(), 50_usize.div_ceil(MESSAGE_HASHES_MAX / HASHES_MAX));
        let whole = state(9, ids.iter().map(|id| (*id, told(0))));
        assert_eq!(whole.len(), 3);
        let heard = all_taken(whole);
        assert_eq!(heard[..2], [Heard::Nothing, Heard::Nothing]);
        assert!(matches!(&heard[2], Heard::All(all) if all.len() == 3_000));
    }

    #[test]
    fn what_was_told_arrives_as_it_was_and_gaps_and_strangers_are_noticed() {
        let mut intake = Intake::new(10);
        let change = |after, last| News::Changes { after, last, bookings: vec![(5, Some(told(4))), (6, None)] };
        assert_eq!(intake.take(encode("i", change(0, 2))), Ok(Heard::Nothing), "nothing is known before the state");
        let all = vec![(5, Some(told(2)))];
        let first = News::State { at: 2, bookings: all.clone(), last: true };
        assert_eq!(intake.take(encode("i", first)), Ok(Heard::All(all)));
        assert_eq!(intake.take(encode("i", change(0, 2))), Ok(Heard::Nothing), "it is in the state");
        assert_eq!(intake.take(encode("i", change(1, 4))), Ok(Heard::Changed(vec![(5, Some(told(4))), (6, None)])));
        assert_eq!(intake.take(encode("i", change(5, 6))), Err(Broken::Gap { applied: 4 }));
        assert_eq!(intake.take(encode("j", change(4, 5))), Err(Broken::OtherInstance));
        let empty = BookingsReply { router_instance_id: "i".to_owned(), message: None };
        assert_eq!(intake.take(empty), Err(Broken::Wire(WireError::Missing { field: "message" })));
        let mut placed = BookedRequest::from(told(HASHES_MAX + 1));
        placed.prefill = placed.decode.clone();
        let heard = Told::try_from(placed.clone()).expect("it has all it needs");
        assert_eq!((heard.prefill, heard.hashes.len()), (None, HASHES_MAX));
        let lacking = BookedRequest { decode: None, ..placed };
        assert_eq!(Told::try_from(lacking), Err(WireError::Missing { field: "decode" }));
    }
}
