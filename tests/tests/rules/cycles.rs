//! Checks that no crate has an import cycle. A reader of one file in a cycle would have to know all files of the cycle.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use tandem_tests::workspace::{crates, text};

/// A module's path from the crate's root, such as `["http", "app"]`.
type Module = Vec<String>;

/// Adds the modules below `dir` to `into`, each with the text of its file. Test modules are omitted.
fn modules(dir: &Path, parent: &[String], into: &mut BTreeMap<Module, String>) {
    for entry in std::fs::read_dir(dir).expect("source folders are readable").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let child = |name: &str| [parent, &[name.to_owned()]].concat();
        if path.is_dir() {
            modules(&path, &child(&name), into);
        } else if let Some(name) = name.strip_suffix(".rs").filter(|name| !name.ends_with("tests") && *name != "main") {
            let module = if matches!(name, "lib" | "mod") { parent.to_vec() } else { child(name) };
            into.insert(module, text(&path));
        }
    }
}

/// Returns the text without comments and without the test module, which is the last item of a file.
fn code(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    product.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the paths of a `use` tree: `a::{b, c::d}` has `a::b` and `a::c::d`.
fn expanded(tree: &str) -> Vec<String> {
    let Some((prefix, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for char in inner.chars() {
        depth += i32::from(char == '{') - i32::from(char == '}');
        match (char, depth) {
            (',', 0) => parts.push(String::new()),
            _ => parts.last_mut().expect("the list has an item").push(char),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| expanded(part)).map(|path| format!("{}{path}", prefix.trim())).collect()
}

/// Returns the modules that a module imports from. Imports from a parent module do not count.
fn imports(module: &Module, text: &str, all: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let code = code(text);
    let uses = code.split("use ").skip(1).filter_map(|rest| rest.split_once(';')).flat_map(|(tree, _)| expanded(tree));
    let inline = code.split(|char: char| !char.is_alphanumeric() && char != '_' && char != ':').map(str::to_owned);
    let resolved = uses.chain(inline).filter_map(|path| {
        let mut segments = path.split("::").map(str::trim).peekable();
        let mut at = module.clone();
        match segments.peek().copied()? {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            first if path.contains("::") && all.contains_key(&[&module[..], &[first.to_owned()]].concat()) => {
                at.push(first.to_owned())
            }
            _ => return None,
        }
        for segment in segments.skip(1) {
            match segment {
                "super" => drop(at.pop()),
                segment if all.contains_key(&[&at[..], &[segment.to_owned()]].concat()) => at.push(segment.to_owned()),
                _ => break,
            }
        }
        Some(at)
    });
    resolved.filter(|to| all.contains_key(to) && !module.starts_with(to)).collect()
}

/// Returns the sets of modules that import from each other, directly or through other modules.
fn cycles(all: &BTreeMap<Module, String>) -> BTreeSet<BTreeSet<Module>> {
    let edges: BTreeMap<&Module, BTreeSet<Module>> =
        all.iter().map(|(module, text)| (module, imports(module, text, all))).collect();
    let reached = |from: &Module| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = next.pop() {
            next.extend(edges[&module].iter().filter(|to| reached.insert((*to).clone())).cloned());
        }
        reached
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> = all.keys().map(|module| (module, reached(module))).collect();
    let cycle = |from: &Module| reached[from].iter().filter(|to| reached[to].contains(from)).cloned().collect();
    all.keys().map(cycle).filter(|cycle: &BTreeSet<Module>| !cycle.is_empty()).collect()
}

#[test]
fn crates_have_no_import_cycles() {
    let mut found = Vec::new();
    for folder in crates() {
        let mut all = BTreeMap::new();
        modules(&folder.join("src"), &[], &mut all);
        let names = |cycle: &BTreeSet<Module>| cycle.iter().map(|module| module.join("::")).collect::<Vec<_>>().join(", ");
        found.extend(cycles(&all).iter().map(|cycle| format!("{}: {}", folder.display(), names(cycle))));
    }
    assert!(found.is_empty(), "{} cycles:\n{}", found.len(), found.join("\n"));
}

#[test]
fn import_cycle_is_detected() {
    let files = [
        ("", "mod a; pub use a::A;"),
        ("a", "use crate::{b::{C, D}, x};"),
        ("b", "fn f() { super::c::g() }"),
        ("c", "use super::{a::A as B}; // use crate::d::E;"),
        ("d", "use crate::a::A;\n#[cfg(test)]\nmod tests { use crate::d::E; }"),
    ];
    let module = |name: &str| name.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect::<Module>();
    let all = files.iter().map(|(name, text)| (module(name), (*text).to_owned())).collect();
    let expected: BTreeSet<Module> = ["a", "b", "c"].map(module).into();
    assert_eq!(cycles(&all), BTreeSet::from([expected]));
}
