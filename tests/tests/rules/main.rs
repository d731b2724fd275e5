//! Checks of the rules for the source code, the documents and the files for operators.

mod architecture;
mod cycles;
mod dashboards;
mod engines_page;
mod glossary;
mod security;
mod tasks;
mod versions;
mod weight;
