//! What `-h` shows: the commands in groups and, for a role, the flags that a new user needs. `--help` shows all flags. And the advice on
//! commands and flags that do not exist.

use super::Cli;
use clap::{CommandFactory, builder::StyledStr};
use std::{ffi::OsString, fmt::Write as _};

/// The groups of commands, in the order of the help.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Run a cluster", &["up", "router", "prefill-worker", "decode-worker", "frontend", "epp"]),
    ("Use it", &["chat", "top", "why", "route", "plan", "drain"]),
    ("Check it", &["ready", "bench", "audit"]),
    ("Set it up", &["model", "key", "cert", "completions", "man"]),
];

/// The flags of roles that `-h` shows, with their help there.
const FIRST_FLAGS: [(&str, &str); 20] = [
    ("model", "The model: a file, a stored model's name, hf:ORG/NAME or pypi:PACKAGE [default: SmolLM2-135M-Instruct]"),
    ("listen", "Address and port; a port alone is one of this machine"),
    ("engine", "What computes the model"),
    ("engine_url", "URLs of the servers that run already, for --engine vllm, sglang and llama-cpp"),
    ("prefill_workers", "Number of workers that compute prompts"),
    ("decode_workers", "Number of workers that generate"),
    ("router", "Addresses of the routers, separated by commas [default: 127.0.0.1:7000]"),
    ("workers", "Addresses of the workers, separated by commas [default: 127.0.0.1:7100,127.0.0.1:7200]"),
    ("peers", "Addresses of the other routers, separated by commas"),
    ("etcd", "Addresses of etcd, in place of these lists"),
    ("advertise", "Address at which other processes reach this one"),
    ("worker_id", "Name of the worker"),
    ("admin_listen", "Address of /live, /ready and /metrics"),
    ("threads", "Threads of each worker's engine on the CPU"),
    ("device", "Index of the GPU"),
    ("served_model_name", "The id that clients send as `model`"),
    ("api_keys_file", "File with the API keys of clients, which `tandem key add` makes [default: no keys]"),
    ("cluster_key_file", "File with the secret that all processes of a cluster share"),
    ("log", "Level of the log, or directives"),
    ("config", "File with settings; --print-config prints one"),
];

/// Commands of other programs, and what to write instead.
const OTHER_COMMANDS: [(&str, &str); 15] = [
    ("run", "`tandem up --model MODEL` serves a model, and `tandem chat` talks to it"),
    ("serve", "did you mean `tandem up`?"),
    ("start", "did you mean `tandem up`?"),
    ("stop", "Ctrl-C, or `kill` with the process's id, stops `tandem up` and each role"),
    ("ps", "did you mean `tandem top`?"),
    ("status", "did you mean `tandem top` or `tandem ready`?"),
    ("explain", "did you mean `tandem route explain`?"),
    ("dashboard", "a frontend serves it at /dashboard; `tandem up` prints its address"),
    ("logs", "each process writes its log to stderr; --log sets its level"),
    ("pull", "did you mean `tandem model fetch`?"),
    ("list", "did you mean `tandem model list`?"),
    ("ls", "did you mean `tandem model list`?"),
    ("show", "did you mean `tandem model show`?"),
    ("rm", "did you mean `tandem model rm`?"),
    ("version", "did you mean `tandem --version`?"),
];

/// Flags of other programs, the flag or the argument of a command for which each is advice, and what to write instead.
const OTHER_FLAGS: [(&str, &str, &str); 8] = [
    ("--api-key", "api-keys-file", "did you mean `--api-keys-file FILE`? `tandem key add` makes the file"),
    ("--api-key", "key-env", "set TANDEM_API_KEY, or name another variable with --key-env"),
    ("--gpu", "engine", "did you mean `--engine cuda`?"),
    ("--host", "listen", "did you mean `--listen IP:PORT`?"),
    ("--max-model-len", "kv-capacity-tokens", "the context is the model's, or --kv-capacity-tokens if that is less"),
    ("--port", "listen", "did you mean `--listen PORT`?"),
    ("--server", "SERVER", "write the server without a flag"),
    ("--tensor-parallel-size", "tp", "did you mean `--tp N`?"),
];

/// Groups of words for one thing. At most one of each is a subcommand of a group of commands, such as `tandem key`.
const SYNONYMS: [&[&str]; 5] = [
    &["add", "create", "generate", "new"],
    &["fetch", "download", "get", "pull"],
    &["list", "ls"],
    &["replay", "run", "serve"],
    &["rm", "delete", "remove", "revoke"],
];

/// Returns the program's command, with the short help of roles if `args` ask for it.
pub(super) fn command_for(args: &[OsString]) -> clap::Command {
    let command = Cli::command();
    let groups = groups(&command);
    let command = command.help_template(format!("{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}{{after-help}}"));
    let command = command.after_help(
        "`tandem COMMAND -h` shows a command's most important flags, `--help` all of them. `tandem --version` prints the version.\n\
         Documentation: README.md and docs in the source, and in share/doc/tandem of the wheel and the tarball\n\
         Start with: tandem up",
    );
    let is_short = args.iter().any(|arg| arg == "-h");
    command.mut_subcommands(|role| if is_short && serves(&role) { shortened(role) } else { role })
}

/// Returns whether the subcommand is a role. Only roles have settings.
pub(super) fn serves(subcommand: &clap::Command) -> bool {
    subcommand.get_arguments().any(|arg| arg.get_id() == "print_config")
}

/// Returns the commands of each group, with the first sentence of their help.
fn groups(command: &clap::Command) -> String {
    let mut text = String::new();
    for (heading, names) in GROUPS {
        let gap = if text.is_empty() { "" } else { "\n" };
        writeln!(text, "{gap}{heading}:").expect("writing to a string does not fail");
        for command in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            writeln!(text, "  {:<15} {about}", command.get_name()).expect("writing to a string does not fail");
        }
    }
    text.trim_end().to_owned()
}

/// Returns the role with the flags that a new user needs, each with a help of one line.
fn shortened(role: clap::Command) -> clap::Command {
    let name = role.get_name().to_owned();
    let role = role.mut_args(|arg| match FIRST_FLAGS.iter().position(|(id, _)| arg.get_id() == *id) {
        Some(at) => arg.help(FIRST_FLAGS[at].1).display_order(at).hide_env(true).help_heading(None::<&str>),
        None => arg.hide(true),
    });
    role.after_help(format!("all flags: tandem {name} --help"))
}

/// Returns the command that `args` call, without the program's name, and the names of its group and itself.
pub(super) fn called<'a>(root: &'a clap::Command, args: &[OsString]) -> (&'a clap::Command, Vec<&'a str>) {
    let (mut command, mut path) = (root, Vec::new());
    while let Some(below) = args.get(path.len() + 1).and_then(|name| command.find_subcommand(name)) {
        command = below;
        path.push(below.get_name());
    }
    (command, path)
}

/// Returns the usage of the command that `args` call, as its help has it.
pub(super) fn usage(root: &clap::Command, args: &[OsString]) -> StyledStr {
    let mut root = root.clone();
    root.build();
    called(&root, args).0.clone().render_usage()
}

/// Returns the advice for a command that does not exist, but has another name here.
pub(super) fn advice(root: &clap::Command, args: &[OsString], given: &str) -> Option<String> {
    let (group, mut path) = called(root, args);
    let advice = if path.is_empty() {
        OTHER_COMMANDS.iter().find(|(name, _)| *name == given)?.1.to_owned()
    } else {
        let words = SYNONYMS.iter().find(|words| words.contains(&given))?;
        let meant = words.iter().find(|word| group.find_subcommand(word).is_some())?;
        format!("did you mean `tandem {} {meant}`?", group.get_name())
    };
    path.push(given);
    Some(format!("there is no command `{}`: {advice}", path.join(" ")))
}

/// Returns the advice for a flag or argument that the called command does not have: what to write instead, or which commands of its group have
/// the flag, or else which of all commands.
pub(super) fn advice_on_flag(root: &clap::Command, args: &[OsString], flag: &str) -> Option<String> {
    let (command, path) = called(root, args);
    let has = |own: &str| {
        let is_named = |arg: &clap::Arg| arg.get_value_names().is_some_and(|names| names[0] == own);
        command.get_arguments().any(|arg| arg.get_long() == Some(own) || is_named(arg))
    };
    if let Some((.., advice)) = OTHER_FLAGS.iter().find(|(other, own, _)| *other == flag && has(own)) {
        return Some(format!("there is no flag `{flag}`: {advice}"));
    }
    if serves(command) && has("model") && !flag.starts_with('-') {
        return Some(format!("did you mean `--model {flag}`?"));
    }
    let name = flag.strip_prefix("--").filter(|_| !path.is_empty())?;
    let takes = |command: &&clap::Command| command.get_arguments().any(|arg| arg.get_long() == Some(name));
    let mut takers = Vec::new();
    for command in root.get_subcommands() {
        let name = command.get_name();
        takers.extend(Some(command).filter(takes).map(|_| format!("`tandem {name}`")));
        takers.extend(command.get_subcommands().filter(takes).map(|below| format!("`tandem {name} {}`", below.get_name())));
    }
    let in_group = |taker: &String| taker.starts_with(&format!("`tandem {} ", path[0]));
    if takers.iter().any(in_group) {
        takers.retain(in_group);
    }
    let (path, takers) = (path.join(" "), takers.join(", "));
    (!takers.is_empty()).then(|| format!("{flag} does not apply to `tandem {path}`, but to {takers}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help(args: &[&str]) -> String {
        let args: Vec<OsString> = ["tandem"].iter().chain(args).map(OsString::from).collect();
        Cli::read(args, None).expect_err("help is no command").to_string()
    }

    #[test]
    fn every_command_is_in_one_group_of_the_help() {
        let command = Cli::command();
        let mut names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        names.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, names);
        let help = help(&["-h"]);
        let line =
            |start: &str| help.lines().position(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {help}"));
        assert!(line("Run a cluster:") < line("  up ") && line("  up ") < line("Use it:") && line("Use it:") < line("  chat "));
        assert!(help.trim_end().ends_with("Start with: tandem up"), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 120), "{help}");
    }

    #[test]
    fn short_help_of_a_role_has_the_flags_that_a_new_user_needs() {
        for (role, flags) in [
            ("up", ["--model", "--listen", "--engine", "--prefill-workers", "--api-keys-file"]),
            ("router", ["--listen", "--workers", "--peers", "--etcd", "--cluster-key-file"]),
            ("decode-worker", ["--model", "--engine", "--worker-id", "--advertise", "--etcd"]),
            ("frontend", ["--model", "--router", "--listen", "--api-keys-file", "--admin-listen"]),
        ] {
            let (short, long) = (help(&[role, "-h"]), help(&[role, "--help"]));
            let shown = |help: &str| help.lines().filter(|line| line.trim_start().starts_with("--")).count();
            assert!((8..=16).contains(&shown(&short)), "{} flags: {short}", shown(&short));
            assert!(shown(&long) > 2 * shown(&short), "{long}");
            assert!(flags.iter().all(|flag| short.contains(flag)), "{short}");
            assert!(short.trim_end().ends_with(&format!("all flags: tandem {role} --help")), "{short}");
            assert!(short.lines().all(|line| line.chars().count() <= 140), "{short}");
        }
    }

    #[test]
    fn flags_of_the_short_help_exist() {
        let command = Cli::command();
        for (id, _) in FIRST_FLAGS {
            assert!(command.get_subcommands().any(|role| role.get_arguments().any(|arg| arg.get_id() == id)), "{id}");
        }
    }

    #[test]
    fn flags_of_other_programs_are_answered_with_advice() {
        for (given, expected) in [
            ("up --port 8001", "there is no flag `--port`: did you mean `--listen PORT`?"),
            ("up --host=0.0.0.0", "`--listen IP:PORT`?"),
            ("decode-worker --tensor-parallel-size 2", "`--tp N`?"),
            ("up --max-model-len 4096", "--kv-capacity-tokens"),
            ("up --gpu", "`--engine cuda`?"),
            ("up --api-key x", "`--api-keys-file FILE`?"),
            ("up SmolLM2", "did you mean `--model SmolLM2`?"),
            ("chat --api-key x", "TANDEM_API_KEY"),
            ("top --server x", "write the server without a flag"),
        ] {
            let error = help(&given.split(' ').collect::<Vec<_>>());
            assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
        }
    }

    #[test]
    fn commands_of_other_programs_are_answered_with_advice() {
        for (given, expected) in [
            ("run", "tandem up --model"),
            ("ps", "`tandem top`"),
            ("rm", "model rm"),
            ("explain", "route explain"),
            ("version", "--version"),
        ] {
            let error = help(&[given]);
            assert!(error.contains(&format!("there is no command `{given}`")) && error.contains(expected), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
        for (given, expected) in [
            ("key rm", "key revoke"),
            ("key delete", "key revoke"),
            ("key create", "key add"),
            ("key ls", "key list"),
            ("model delete", "model rm"),
            ("model download", "model fetch"),
            ("bench serve", "bench replay"),
        ] {
            let error = help(&given.split(' ').chain(["x"]).collect::<Vec<_>>());
            assert_eq!(error, format!("error: there is no command `{given}`: did you mean `tandem {expected}`?\n"));
        }
        assert!(help(&["down"]).contains("unrecognized subcommand"));
        for (given, _) in OTHER_COMMANDS {
            assert!(Cli::command().find_subcommand(given).is_none(), "{given} is a command");
        }
    }
}
