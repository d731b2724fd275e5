//! Puts system messages where a template can render them. Coding agents send some in the middle of a conversation, which many templates refuse or
//! move to the head.
//!
//! A message is never moved to the head: the head would change in each turn, and nothing that follows it would be found in the cache again. It stays
//! in its place as a marked message of the user.

use crate::chat::{Message, Role};

/// Where a template renders system messages, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SystemPlaces {
    /// The template renders no system messages.
    Never,
    /// The template renders one system message, which is the first message.
    First,
    /// The template renders system messages everywhere.
    #[default]
    Anywhere,
}

/// Puts system messages that follow a call after the call's results, which templates expect there.
pub(super) fn after_results(messages: &mut Vec<Message>) {
    let (mut placed, mut waiting) = (Vec::<Message>::with_capacity(messages.len()), Vec::new());
    for message in messages.drain(..) {
        let awaits_result = |last: &Message| last.role == Role::Tool || !last.tool_calls.is_empty();
        match message.role {
            Role::System if placed.last().is_some_and(awaits_result) => waiting.push(message),
            Role::Tool => placed.push(message),
            _ => {
                placed.append(&mut waiting);
                placed.push(message);
            }
        }
    }
    placed.append(&mut waiting);
    *messages = placed;
}

/// Changes the system messages that the template cannot render. Those at the head become one message, if the template renders one there. All others
/// become texts of the user, with a mark. After a tool's result, the text is appended to the result: as a message of its own it would be the last
/// question, and many templates leave out the reasoning before the last question. If user and assistant have to alternate (`alternates`), the text
/// is appended to a preceding message of the user, or else put before the user's next message; and a message of the user that follows one of the
/// user or a tool is appended to it.
pub(super) fn place(messages: &mut Vec<Message>, places: SystemPlaces, alternates: bool) {
    if places == SystemPlaces::Anywhere && !alternates {
        return;
    }
    let mut placed: Vec<Message> = Vec::with_capacity(messages.len());
    // The marked text of system messages that becomes the beginning of the user's next message.
    let mut waiting: Option<Message> = None;
    for message in messages.drain(..) {
        let is_head = placed.iter().all(|placed| placed.role == Role::System) && waiting.is_none();
        if message.role == Role::System && places == SystemPlaces::Anywhere {
            placed.push(message);
        } else if message.role == Role::System && places == SystemPlaces::First && is_head {
            match placed.first_mut() {
                Some(first) => append(first, &message),
                None => placed.push(message),
            }
        } else if message.role == Role::System {
            let marked = marked(&message);
            match placed.last_mut() {
                _ if let Some(waiting) = &mut waiting => append(waiting, &marked),
                Some(last) if last.role == Role::Tool || (alternates && last.role == Role::User) => append(last, &marked),
                _ if alternates => waiting = Some(marked),
                _ => placed.push(marked),
            }
        } else if message.role == Role::User
            && alternates
            && let Some(last) = placed.last_mut().filter(|last| matches!(last.role, Role::User | Role::Tool))
        {
            append(last, &message);
        } else {
            match waiting.take() {
                Some(mut before) if message.role == Role::User => {
                    append(&mut before, &message);
                    placed.push(Message { content: before.content, ..message });
                }
                Some(before) => placed.extend([before, message]),
                None => placed.push(message),
            }
        }
    }
    placed.extend(waiting);
    *messages = placed;
}

/// Returns the message as one of the user.
fn marked(message: &Message) -> Message {
    Message::new(Role::User, format!("<system>\n{}\n</system>", message.content.as_deref().unwrap_or_default()))
}

fn append(message: &mut Message, more: &Message) {
    message.append("\n\n", more.content.as_deref().unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes and reads messages as `s:text`, with the role's first letter.
    fn messages(short: &[&str]) -> Vec<Message> {
        let role = |letter| match letter {
            "s" => Role::System,
            "u" => Role::User,
            "a" => Role::Assistant,
            _ => Role::Tool,
        };
        short.iter().filter_map(|text| text.split_once(':')).map(|(letter, text)| Message::new(role(letter), text)).collect()
    }

    fn placed(short: &[&str], places: SystemPlaces, alternates: bool) -> Vec<String> {
        let mut messages = messages(short);
        after_results(&mut messages);
        place(&mut messages, places, alternates);
        let text = |message: &Message| message.content.clone().unwrap_or_default().replace('\n', "/");
        messages.iter().map(|message| format!("{}:{}", &message.role.label()[..1], text(message))).collect()
    }

    #[test]
    fn system_messages_stay_in_place() {
        use SystemPlaces::{Anywhere, First, Never};
        let given = ["s:A", "s:B", "u:1", "s:C", "a:2", "s:D", "s:E", "u:3", "t:4", "s:F"];
        assert_eq!(placed(&given, Anywhere, false), given);
        assert_eq!(placed(&["u:1", "u:2", "a:3", "t:4", "u:5"], Anywhere, true), ["u:1//2", "a:3", "t:4//5"]);
        let [c, d, e, f] = ["C", "D", "E", "F"].map(|text| format!("<system>/{text}/</system>"));
        assert_eq!(
            placed(&given, First, false),
            ["s:A//B", "u:1", &format!("u:{c}"), "a:2", &format!("u:{d}"), &format!("u:{e}"), "u:3", &format!("t:4//{f}")]
        );
        assert_eq!(
            placed(&given, First, true),
            ["s:A//B", &format!("u:1//{c}"), "a:2", &format!("u:{d}//{e}//3"), &format!("t:4//{f}")]
        );
        let [a, b] = ["A", "B"].map(|text| format!("<system>/{text}/</system>"));
        assert_eq!(placed(&given, Never, true)[0], format!("u:{a}//{b}//1//{c}"));
        assert_eq!(placed(&given, Never, false)[..3], [format!("u:{a}"), format!("u:{b}"), "u:1".to_owned()]);
        assert_eq!(placed(&["s:A"], Never, true), [format!("u:{a}")]);
        assert_eq!(placed(&["s:A", "a:1"], Never, true), [format!("u:{a}"), "a:1".to_owned()]);
    }

    /// The messages that one turn has sent stay the same in all later turns, so that their KV is found in the prefix cache.
    #[test]
    fn earlier_messages_do_not_change_when_the_conversation_continues() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..2_000 {
            let mut given: Vec<String> = Vec::new();
            let mut before: Option<Vec<String>> = None;
            let (places, alternates) = ([SystemPlaces::Never, SystemPlaces::First][next(2) as usize], next(2) == 0);
            for turn in 0..6 {
                if turn > 0 {
                    given.push(format!("a:{turn}"));
                }
                // A turn of the client ends with its question or a tool's result, which system messages may precede or follow.
                given.extend((0..next(3)).map(|number| format!("s:{turn}.{number}")));
                given.push(format!("{}:{turn}", if turn > 0 && next(3) == 0 { "t" } else { "u" }));
                given.extend((0..next(3)).map(|number| format!("s:{turn}+{number}")));
                let short: Vec<&str> = given.iter().map(String::as_str).collect();
                let found = placed(&short, places, alternates);
                assert!(before.is_none_or(|before| found.starts_with(&before)), "{given:?}: {found:?}");
                before = Some(found);
            }
        }
    }
}
