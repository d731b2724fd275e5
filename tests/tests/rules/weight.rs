//! Limits the size of the product: lines by crate, long functions, functions with a `bool` parameter, and type names with several meanings.
//! `cargo test -p tandem-tests --release --test rules product -- --nocapture` prints the numbers.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};
use tandem_tests::workspace::{crates, files, text};

/// The longest function that counts as short, in lines.
const SHORT_LINES: usize = 60;

/// What is counted, and its limit. A limit is lowered when a change stays below it, and raised only with a reason.
const LIMITS: [(&str, usize); 5] = [
    ("lines of code", 66_633),
    ("lines of the largest crate", 8_120),
    ("functions longer than 60 lines", 4),
    ("functions with a bool parameter", 33),
    ("type names with several meanings", 45),
];

/// The product's part of a source file: without the test module, which is the last item, and without comments and blank lines.
fn product(text: &str) -> Vec<&str> {
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    product.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//")).collect()
}

/// Returns the name after a keyword at the beginning of a line, such as `fn` or `struct`, with the words that may precede it.
fn defined<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace();
    let is_before = |word: &&str| word.starts_with("pub") || ["async", "const", "unsafe", "extern", "\"C\""].contains(word);
    let mut word = words.next()?;
    while is_before(&word) {
        word = words.next()?;
    }
    if word != keyword {
        return None;
    }
    words.next()?.split(|char: char| !char.is_alphanumeric() && char != '_').next()
}

/// Returns the length in lines of the function that begins at the first line, and its parameters. rustfmt closes it at the indentation of
/// its head.
fn function(lines: &[&str]) -> (usize, String) {
    let indentation = lines[0].len() - lines[0].trim_start().len();
    // A method without a body ends with the line of its closing parenthesis.
    let is_end = |rest: &str| rest.starts_with('}') || rest.starts_with(')') && rest.ends_with(';');
    let closes = |line: &&str| line.strip_prefix(&lines[0][..indentation]).is_some_and(is_end);
    let is_one_line = lines[0].ends_with(['}', ';']);
    let end = if is_one_line { 0 } else { lines.iter().position(closes).unwrap_or(0) };
    let head: String = lines[..=end].iter().take_while(|line| !line.trim_start().starts_with("where")).copied().collect();
    let parameters = head.split_once('(').map_or("", |(_, rest)| rest);
    (end + 1, parameters.split(") ->").next().unwrap_or_default().split(") {").next().unwrap_or_default().to_owned())
}

#[derive(Debug, Default)]
struct Weight {
    lines: BTreeMap<String, usize>,
    long: usize,
    with_bool: usize,
    /// The places in which each type name is defined.
    types: BTreeMap<String, BTreeSet<String>>,
}

impl Weight {
    fn add(&mut self, crate_name: &str, file: &str, text: &str) {
        let lines = product(text);
        *self.lines.entry(crate_name.to_owned()).or_default() += lines.len();
        for (at, line) in lines.iter().enumerate() {
            if defined(line, "fn").is_some() {
                let (length, parameters) = function(&lines[at..]);
                self.long += usize::from(length > SHORT_LINES);
                self.with_bool += usize::from(parameters.contains(": bool"));
            }
            for keyword in ["struct", "enum", "trait", "type", "union"] {
                // Associated types are indented.
                if let Some(name) = defined(line, keyword).filter(|_| !line.starts_with(' ')) {
                    self.types.entry(name.to_owned()).or_default().insert(file.to_owned());
                }
            }
        }
    }

    fn numbers(&self) -> [usize; 5] {
        let ambiguous = self.types.values().filter(|places| places.len() > 1).count();
        let largest = self.lines.values().copied().max().unwrap_or_default();
        [self.lines.values().sum(), largest, self.long, self.with_bool, ambiguous]
    }
}

fn is_product(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "rs")
        && !path.ends_with("tests.rs")
        && !path.components().any(|part| part.as_os_str() == "tests")
}

#[test]
#[expect(clippy::print_stdout, reason = "it prints the numbers")]
fn product_stays_within_its_limits() {
    let mut weight = Weight::default();
    for folder in crates().iter().filter(|folder| !folder.ends_with("tests")) {
        let name = folder.file_name().expect("the folder has a name").to_string_lossy().into_owned();
        for file in files(&folder.join("src")).into_iter().filter(|file| is_product(file)) {
            weight.add(&name, &file.to_string_lossy(), &text(&file));
        }
    }
    assert!(weight.lines.len() > 15, "the workspace was not read: {:?}", weight.lines);
    weight.lines.iter().for_each(|(name, lines)| println!("{lines:7}  {name}"));
    let beyond = LIMITS.iter().zip(weight.numbers()).filter(|((name, limit), found)| {
        println!("{found:7}  {name} (at most {limit})");
        found > limit
    });
    let beyond: Vec<String> = beyond.map(|((name, limit), found)| format!("{found} {name}, at most {limit}")).collect();
    assert!(beyond.is_empty(), "{beyond:?}: make something shorter, or raise the limit with a reason");
}

#[test]
fn lines_functions_and_types_of_a_file_are_counted() {
    let long = "    a();\n".repeat(70);
    let source = format!(
        "//! Head.\n\npub(crate) struct A;\nenum B {{ C }}\nimpl A {{\n    pub async fn one(\n        &self,\n        is_on: bool,\n    ) -> u8 {{\n        1\n    }}\n    type D = u8;\n}}\nfn two(a: u8) -> bool {{ a > 1 }}\nfn three() {{\n{long}}}\n#[cfg(test)]\nmod tests {{ fn four(a: bool) {{}} }}\n"
    );
    let mut weight = Weight::default();
    weight.add("x", "a.rs", &source);
    weight.add("x", "b.rs", "struct A;\n");
    assert_eq!(weight.numbers(), [85, 85, 1, 1, 1], "{weight:?}");
}
