//! Reads the rows of a file, which are JSON values: one per line, or the elements of one array.

use super::{Problem, TraceError};
use serde::{
    Deserializer,
    de::{DeserializeSeed, SeqAccess, Visitor},
};
use serde_json::Value;
use std::{
    fmt,
    fs::File,
    io::{BufRead, BufReader},
    ops::ControlFlow,
    path::Path,
};

/// Processes a row, or returns the problem of an invalid row.
type EachRow<'a> = dyn FnMut(Value) -> Result<ControlFlow<()>, Problem> + 'a;

/// Reads the rows of a file and passes each to `each`, until `each` returns `Break`. Empty lines are skipped.
pub(super) fn read(path: &Path, each: &mut EachRow<'_>) -> Result<(), TraceError> {
    let mut file = open(path)?;
    if starts_array(&mut file).map_err(|source| unreadable(path, source))? {
        return read_array(path, file, each);
    }
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if file.read_until(b'\n', &mut line).map_err(|source| unreadable(path, source))? == 0 {
            break;
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let row = serde_json::from_slice(&line).map_err(|error| on_line(&error));
        match row.and_then(&mut *each) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break,
            Err(problem) => return Err(TraceError::Row { path: path.to_owned(), line: number, problem }),
        }
    }
    Ok(())
}

/// Returns whether the file is one JSON array.
pub(super) fn is_array(path: &Path) -> Result<bool, TraceError> {
    starts_array(&mut open(path)?).map_err(|source| unreadable(path, source))
}

fn open(path: &Path) -> Result<BufReader<File>, TraceError> {
    Ok(BufReader::with_capacity(1 << 16, File::open(path).map_err(|source| unreadable(path, source))?))
}

fn unreadable(path: &Path, source: std::io::Error) -> TraceError {
    TraceError::Read { path: path.to_owned(), source }
}

/// Returns whether the first character other than white space is `[`. Consumes no line.
fn starts_array(file: &mut BufReader<File>) -> std::io::Result<bool> {
    Ok(file.fill_buf()?.trim_ascii_start().first() == Some(&b'['))
}

/// Returns the error of a row on one line, without the line number in serde's message, which would always be 1.
fn on_line(error: &serde_json::Error) -> Problem {
    let text = format!(
        "{}{error}",
        if error.is_data() { "" } else { "the row is not JSON (a trace has a JSON object a line, or one array of them): " }
    );
    let place = format!(" at line {} column {}", error.line(), error.column());
    Problem::Json(match text.strip_suffix(&place) {
        Some(problem) => format!("{problem} at column {}", error.column()),
        None => text,
    })
}

fn read_array(path: &Path, file: BufReader<File>, each: &mut EachRow<'_>) -> Result<(), TraceError> {
    let mut array = RowArray { each, end: None };
    let mut json = serde_json::Deserializer::from_reader(file);
    let read = json.deserialize_seq(&mut array).and_then(|()| json.end());
    let Err(error) = read else { return Ok(()) };
    let problem = match array.end {
        Some(RowsEnd::Broken) => return Ok(()),
        Some(RowsEnd::Wrong(problem)) => problem,
        None if error.is_io() => return Err(unreadable(path, error.into())),
        None => on_line(&error),
    };
    Err(TraceError::Row { path: path.to_owned(), line: error.line(), problem })
}

/// Passes the elements of an array on one at a time, so that the whole array need not fit into memory.
struct RowArray<'a, 'b> {
    each: &'a mut EachRow<'b>,
    end: Option<RowsEnd>,
}

/// The reason why the array was not read to its end.
enum RowsEnd {
    Broken,
    Wrong(Problem),
}

impl<'de> Visitor<'de> for &mut RowArray<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut rows: A) -> Result<(), A::Error> {
        while let Some(()) = rows.next_element_seed(&mut *self)? {}
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut RowArray<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let row = <Value as serde::Deserialize>::deserialize(deserializer)?;
        let end = match (self.each)(row) {
            Ok(ControlFlow::Continue(())) => return Ok(()),
            Ok(ControlFlow::Break(())) => RowsEnd::Broken,
            Err(problem) => RowsEnd::Wrong(problem),
        };
        self.end = Some(end);
        // A visitor can leave an array only with an error. The text of this error is not used.
        Err(serde::de::Error::custom("the reader stops here"))
    }
}
