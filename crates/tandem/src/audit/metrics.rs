//! Reads the subset of Prometheus' text format that the audit needs for its sums.

use std::collections::BTreeMap;

/// The last samples of the metrics of all processes. A process that was restarted has one file of samples for each run.
#[derive(Clone, Debug, Default)]
pub struct MetricSamples(Vec<(String, String, f64)>);

impl MetricSamples {
    /// Adds the samples in one file.
    pub fn add(&mut self, text: &str) {
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.trim().rsplit_once(' ') else { continue };
            let Ok(value) = value.parse() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            self.0.push((name.to_owned(), labels.trim_end_matches('}').to_owned(), value));
        }
    }

    /// Returns the sum over all series of this name whose labels contain `labels`.
    pub fn sum(&self, name: &str, labels: &str) -> f64 {
        self.sum_of(name, &[labels])
    }

    pub(super) fn sum_of(&self, name: &str, labels: &[&str]) -> f64 {
        let wanted = |(of, has, _): &&(String, String, f64)| of == name && labels.iter().all(|label| has.contains(label));
        self.0.iter().filter(wanted).fold(0.0, |sum, (_, _, value)| sum + value)
    }

    /// Returns the values of the metric family `name`, by the value of its label `label`. The values of several runs of a
    /// worker are added up, so its capacity and its blocks remain comparable.
    pub(super) fn values(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut values = BTreeMap::new();
        for (_, labels, value) in self.0.iter().filter(|(of, _, _)| of == name) {
            let found = labels.split(',').find_map(|pair| pair.strip_prefix(label)?.strip_prefix("=\"")?.strip_suffix('"'));
            if let Some(found) = found {
                *values.entry(found.to_owned()).or_insert(0.0) += value;
            }
        }
        values
    }
}
