//! The layers of settings. clap reads flags, environment variables and defaults. A key of the configuration file replaces the default of
//! the flag with the same name, so one parser reads and checks all layers.

use super::{
    Cli,
    help::{self, serves},
    rules,
};
use crate::server::KEY_VARIABLE;
use clap::{
    ArgMatches, CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::{
    ffi::{OsStr, OsString},
    fmt::Display,
    path::{Path, PathBuf},
};

impl Cli {
    /// Reads the command line, the environment and the configuration file that `--config` names. `otel_endpoint` is the value of
    /// OTEL_EXPORTER_OTLP_ENDPOINT, the standard variable for the address of a collector of traces. An empty variable is treated as unset.
    ///
    /// # Errors
    /// A flag, a variable or a key of the file is unknown or has a wrong value, or settings exclude each other.
    pub fn read(args: Vec<OsString>, otel_endpoint: Option<OsString>) -> Result<Self, clap::Error> {
        let mut command = without_empty_variables(help::command_for(&args));
        if let Some(endpoint) = otel_endpoint.filter(|endpoint| !endpoint.is_empty()) {
            let endpoint = endpoint.to_string_lossy().into_owned();
            command = command.mut_subcommands(|role| {
                if !serves(&role) {
                    return role;
                }
                role.mut_arg("otlp_endpoint", |arg| arg.default_value(endpoint.clone()))
            });
        }
        let mut matches = parse(&command, &args)?;
        if let Some((role, file)) = matches.subcommand().and_then(|(role, given)| Some((role.to_owned(), config(given)?))) {
            command = with_file(command, &role, &file)?;
            // This parse has no flags, so its errors are mistakes in the file, not on the command line.
            let without_flags = command.clone().try_get_matches_from(&args[..2]);
            without_flags.map_err(|error| refused(&file, without_advice(&error)))?;
            matches = command.clone().try_get_matches_from(&args)?;
        }
        let cli = Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
        if let Some((role, given)) = matches.subcommand() {
            rules::check(role, given).map_err(|problem| clap::Error::raw(ErrorKind::ArgumentConflict, problem + "\n"))?;
        }
        Ok(cli)
    }

    /// Returns those of these names of environment variables that look like settings of this program, but are none.
    pub fn unknown_variables(names: impl Iterator<Item = String>) -> Vec<String> {
        let command = Self::command();
        let is_unknown = |name: &String| {
            // Kubernetes sets variables such as TANDEM_PORT for a service with the name `tandem`.
            let of_service = name.contains("_PORT") || name.contains("_SERVICE_");
            name.starts_with("TANDEM_") && !of_service && name != KEY_VARIABLE && !reads(&command, name)
        };
        names.filter(is_unknown).collect()
    }
}

/// Returns whether a flag or argument of the command, or of one below it, has this environment variable.
fn reads(command: &clap::Command, name: &str) -> bool {
    command.get_arguments().any(|arg| arg.get_env().is_some_and(|variable| variable == name))
        || command.get_subcommands().any(|below| reads(below, name))
}

/// Returns the command without the environment variables that are empty. Compose files set variables without a value to the empty text.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |arg: &clap::Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    command.mut_args(|arg| if is_empty(&arg) { arg.env(None::<&str>) } else { arg }).mut_subcommands(without_empty_variables)
}

/// Returns the path given by `--config`; `None` if the flag is not set.
fn config(role: &ArgMatches) -> Option<PathBuf> {
    role.try_get_one::<PathBuf>("config").ok().flatten().cloned()
}

/// Parses the command line. For a command or flag that does not exist here, the error names the one to use, or the commands that have the flag.
fn parse(command: &clap::Command, args: &[OsString]) -> Result<ArgMatches, clap::Error> {
    command.clone().try_get_matches_from(args).map_err(|mut error| {
        // clap's own line shows the variables in the environment as flags that are required.
        if error.get(ContextKind::Usage).is_some() {
            error.insert(ContextKind::Usage, ContextValue::StyledStr(help::usage(command, args)));
        }
        if let Some(variable) = wrong_variable(command, args, &error) {
            error.insert(ContextKind::InvalidArg, ContextValue::String(variable));
        }
        let advice = match (error.get(ContextKind::InvalidSubcommand), error.get(ContextKind::InvalidArg)) {
            (Some(ContextValue::String(given)), _) => help::advice(command, args, given),
            (_, Some(ContextValue::String(flag))) if error.kind() == ErrorKind::UnknownArgument => {
                help::advice_on_flag(command, args, flag)
            }
            _ => None,
        };
        match advice {
            Some(advice) => clap::Error::raw(error.kind(), advice + "\n"),
            None if error.kind() == ErrorKind::ValueValidation => {
                clap::Error::raw(error.kind(), in_own_words(error.to_string().trim_start_matches("error: ")))
            }
            None => error,
        }
    })
}

/// Returns the environment variable that has the wrong value of this error; `None` if the command line has it.
fn wrong_variable(command: &clap::Command, args: &[OsString], error: &clap::Error) -> Option<String> {
    let (Some(ContextValue::String(flag)), Some(ContextValue::String(value))) =
        (error.get(ContextKind::InvalidArg), error.get(ContextKind::InvalidValue))
    else {
        return None;
    };
    let has_value = |text: &OsStr| {
        let text = text.to_string_lossy();
        text == value.as_str() || text.split(['=', ',']).any(|part| part == value)
    };
    if args.iter().any(|arg| has_value(arg)) {
        return None;
    }
    let mut root = command.clone();
    root.build();
    let arg = help::called(&root, args).0.get_arguments().find(|arg| arg.to_string() == *flag)?;
    let variable = arg.get_env()?;
    std::env::var_os(variable).is_some_and(|text| has_value(&text)).then(|| variable.to_string_lossy().into_owned())
}

/// Returns the command with the values in the file as the defaults of the role's flags. Keys that only other roles have are skipped, so
/// that one file can hold the settings of a whole cluster.
fn with_file(command: clap::Command, role: &str, file: &Path) -> Result<clap::Command, clap::Error> {
    let text = std::fs::read_to_string(file).map_err(|error| refused(file, error))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| refused(file, on_one_line(&text, &error)))?;
    table.into_iter().try_fold(command, |command, (key, value)| {
        if value.is_table() {
            return Err(refused(file, format!("`{key}` is a section, and this file has none; write all keys without sections")));
        }
        let arg_of = |role: &clap::Command| {
            let is_key = |arg: &&clap::Arg| arg.get_long() == Some(&key) && key != "config" && key != "print-config";
            role.get_arguments().find(is_key).map(|arg| arg.get_id().clone())
        };
        let Some(arg) = command.find_subcommand(role).and_then(arg_of) else {
            if command.get_subcommands().filter(|role| serves(role)).any(|role| arg_of(role).is_some()) {
                return Ok(command);
            }
            let advice = match similar_key(&command, role, &key) {
                Some(similar) => format!("did you mean `{similar}`?"),
                None => format!("`tandem {role} --print-config` prints the keys of this role"),
            };
            let problem = format!("unknown key `{key}`; {advice}");
            return Err(refused(file, problem));
        };
        let value = match value {
            toml::Value::String(text) => text,
            toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => value.to_string(),
            _ => {
                let problem = "is not a plain value; write a list as one string with commas, such as \"a:1,b:2\"";
                return Err(refused(file, format!("`{key}` {problem}")));
            }
        };
        Ok(command.mut_subcommand(role, |role| role.mut_arg(arg, |arg| arg.default_value(value))))
    })
}

/// Returns the key of the role that is similar to this unknown one, as clap suggests it for flags.
fn similar_key(command: &clap::Command, role: &str, key: &str) -> Option<String> {
    let given = [command.get_name(), role, &format!("--{key}")].map(str::to_owned);
    let error = command.clone().try_get_matches_from(given).err()?;
    let suggested = match error.get(ContextKind::SuggestedArg)? {
        ContextValue::String(flag) => flag,
        ContextValue::Strings(flags) => flags.first()?,
        _ => return None,
    };
    Some(suggested.trim_start_matches('-').to_owned())
}

/// Rust's messages about invalid numbers, and this program's messages in place of them.
const NUMBERS: [(&str, &str); 5] = [
    ("invalid digit found in string", "write a whole number"),
    ("cannot parse integer from empty string", "write a whole number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("number would be zero for non-zero type", "write a whole number above 0"),
];

fn in_own_words(message: &str) -> String {
    NUMBERS.iter().fold(message.to_owned(), |message, (rust, own)| message.replace(rust, own))
}

/// Returns the message of `error` without clap's hints, which are for the command line and do not apply to the file.
fn without_advice(error: &clap::Error) -> String {
    let text = error.to_string();
    let message = text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
    in_own_words(&message.lines().map(str::trim).collect::<Vec<_>>().join(" "))
}

/// Returns the message of a TOML error in one line. It includes the number of the line of `text` in which the error is.
fn on_one_line(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().and_then(|span| text.get(..span.start)).map_or(1, |before| before.matches('\n').count() + 1);
    format!("line {line} is not valid TOML: {}", error.message().replace('\n', ", "))
}

fn refused(file: &Path, problem: impl Display) -> clap::Error {
    clap::Error::raw(ErrorKind::ValueValidation, format!("in {}: {problem}\n", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_no_command_reads_are_unknown() {
        let names = ["TANDEM_ENGINE", "TANDEM_ENGIN", "TANDEM_API_KEY", "TANDEM_FRONTEND", "TANDEM_CONFIG", "TANDEM_MODELS_DIR"];
        let of_services = ["TANDEM_PORT", "TANDEM_ROUTER_SERVICE_HOST", "TANDEM_ROUTER_PORT_7000_TCP", "PATH"];
        let unknown = Cli::unknown_variables(names.into_iter().chain(of_services).map(str::to_owned));
        assert_eq!(unknown, ["TANDEM_ENGIN"]);
    }

    #[test]
    fn wrong_numbers_on_the_command_line_are_refused_in_plain_words() {
        for (args, expected) in [
            ("up --prefill-workers x", "invalid value 'x' for '--prefill-workers <N>': write a whole number"),
            ("key add a --requests-per-minute 0", "write a whole number above 0"),
        ] {
            let args = ["tandem"].into_iter().chain(args.split(' ')).map(OsString::from).collect();
            let error = Cli::read(args, None).expect_err("the number is wrong").to_string();
            assert!(error.starts_with("error: ") && error.contains(expected), "{error}");
        }
    }
}
