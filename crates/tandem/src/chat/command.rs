//! The commands of the conversation, such as `/clear`.

/// The list of commands for the user.
pub(super) const HELP: &str = "/clear              begins another conversation\n\
                               /system TEXT        sets the system message; without TEXT, removes it\n\
                               /set temperature X  sets how random answers are, from 0 to 2\n\
                               /model NAME         continues with another model; without NAME, lists the models\n\
                               \"\"\"                 begins a message of several lines, and ends it\n\
                               /quit               ends the program, as Ctrl-D does\n\
                               Ctrl-C              ends the answer that is being written\n\
                               Other lines that begin with / and a word, such as /foo bar, are not sent, except between \"\"\"\n";

const QUOTES: &str = "\"\"\" around a text sends it as it is";

/// What a line of the user means.
#[derive(Debug, PartialEq)]
pub(super) enum ChatCommand<'a> {
    Clear,
    Help,
    Quit,
    System(&'a str),
    Temperature(f64),
    Model(&'a str),
    /// The line is meant as a command, and this is wrong with it.
    Wrong(String),
    /// The line is no command.
    Message,
}

impl<'a> ChatCommand<'a> {
    pub(super) fn of(line: &'a str) -> Self {
        let line = line.trim();
        let (name, rest) = line.split_once(char::is_whitespace).map_or((line, ""), |(name, rest)| (name, rest.trim()));
        match (name, rest) {
            ("/clear", "") => Self::Clear,
            ("/help" | "/?", "") => Self::Help,
            ("/quit" | "/exit", "") => Self::Quit,
            ("/clear" | "/help" | "/quit" | "/exit", _) => Self::Wrong(format!("{name} takes no text; {QUOTES}")),
            ("/system", text) => Self::System(text),
            ("/model", name) => Self::Model(name),
            ("/set", setting) => {
                match setting.split_once(' ').and_then(|(name, value)| Some((name, temperature(value.trim()).ok()?))) {
                    Some(("temperature", value)) => Self::Temperature(value),
                    _ => Self::Wrong("write /set temperature X, where X is a number from 0 to 2".to_owned()),
                }
            }
            // Paths with another slash, such as /usr/bin, are messages.
            (name, _) if name.strip_prefix('/').is_some_and(|word| word.chars().all(is_of_word)) => Self::Wrong(format!(
                "there is no command {name}; the commands are /clear, /help, /model, /quit, /set and /system, and {QUOTES}"
            )),
            _ => Self::Message,
        }
    }
}

fn is_of_word(char: char) -> bool {
    char.is_alphabetic() || "_-.:?".contains(char)
}

pub(super) fn temperature(text: &str) -> Result<f64, &'static str> {
    text.parse().ok().filter(|number| (0.0..=2.0).contains(number)).ok_or("write a number from 0 to 2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_messages() {
        for (line, expected) in [
            (" /clear ", ChatCommand::Clear),
            ("/exit", ChatCommand::Quit),
            ("/system You are brief.", ChatCommand::System("You are brief.")),
            ("/system", ChatCommand::System("")),
            ("/set  temperature  0.5", ChatCommand::Temperature(0.5)),
            ("/model  m", ChatCommand::Model("m")),
            ("/?", ChatCommand::Help),
            ("/usr/bin is a folder", ChatCommand::Message),
            ("/usr/bin", ChatCommand::Message),
            ("/2 is a half", ChatCommand::Message),
            ("clear", ChatCommand::Message),
        ] {
            assert_eq!(ChatCommand::of(line), expected, "{line}");
        }
        for wrong in ["/set", "/set temperature", "/set temperature 3", "/set temperature nan", "/set top_p 1"] {
            assert!(matches!(ChatCommand::of(wrong), ChatCommand::Wrong(text) if text.contains("0 to 2")), "{wrong}");
        }
        for wrong in ["/nothing", "/foo bar", "/Quit", "/", "/top_p 0.9", "/set-temp 1", "/quit.", "/etc has what?"] {
            assert!(matches!(ChatCommand::of(wrong), ChatCommand::Wrong(text) if text.contains("/clear, ")), "{wrong}");
        }
        // A question that begins with a command must not end the conversation.
        for wrong in ["/clear all", "/quit now", "/exit\tcodes", "/quit\nand more", "/help me"] {
            assert!(matches!(ChatCommand::of(wrong), ChatCommand::Wrong(text) if text.contains("takes no text")), "{wrong}");
        }
    }
}
