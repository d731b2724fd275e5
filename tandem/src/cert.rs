//! `tandem cert`: makes the certificates of a cluster's processes, and an authority that signs them.

use anyhow::{Context, Result, ensure};
use jiff::{Timestamp, ToSpan, civil::Date, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, OpenOptions},
    io::Write,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use tandem_proto::channel::{Peer, PeerRole};

/// The permissions of the folder and of private keys.
const FOLDER_MODE: u32 = 0o700;
const KEY_MODE: u32 = 0o600;
const CERTIFICATE_MODE: u32 = 0o644;

/// The arguments of `tandem cert`.
#[derive(clap::Args, Debug)]
pub struct CertArgs {
    /// Folder for ca.pem, ca.key, and a certificate ROLE.pem with its key ROLE.key for each role
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Name of the cluster, as in --cluster
    #[arg(long, value_name = "NAME", default_value = crate::settings::CLUSTER, value_parser = crate::settings::cluster_name)]
    cluster: String,
    /// How many days the certificates of the roles are valid; the authority is valid for ten years
    #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3_650))]
    days: u32,
}

/// Makes certificates for all roles. The authority in the folder is used again, so that processes with old and new certificates trust each
/// other; without one, an authority is made as well. Returns what was written.
///
/// # Errors
/// The folder cannot be written, or it has only a part of an authority.
pub fn run(args: &CertArgs) -> Result<String> {
    let CertArgs { folder, cluster, days } = args;
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder).with_context(|| cannot("created", folder))?;
    let (ca_pem, ca_key) = (folder.join("ca.pem"), folder.join("ca.key"));
    let authority = authority_params(cluster)?;
    let mut report = String::new();
    ensure!(
        ca_pem.exists() == ca_key.exists(),
        "{} has only one of ca.pem and ca.key; add the other file, or delete this one to make another authority",
        folder.display()
    );
    let authority = if ca_key.exists() {
        let key = fs::read_to_string(&ca_key).with_context(|| cannot("read", &ca_key))?;
        Issuer::new(authority, KeyPair::from_pem(&key).with_context(|| cannot("used", &ca_key))?)
    } else {
        let key = KeyPair::generate()?;
        write(&ca_key, KEY_MODE, &key.serialize_pem())?;
        write(&ca_pem, CERTIFICATE_MODE, &authority.self_signed(&key)?.pem())?;
        writeln!(report, "{}  the authority; keep ca.key off the hosts of the cluster", ca_pem.display())?;
        Issuer::new(authority, key)
    };
    for role in PeerRole::ALL {
        let key = KeyPair::generate()?;
        let peer = Peer { cluster: cluster.clone(), role };
        let certificate = params(&peer, *days)?.signed_by(&key, &authority)?;
        let path = folder.join(format!("{}.pem", role.name()));
        write(&path.with_extension("key"), KEY_MODE, &key.serialize_pem())?;
        write(&path, CERTIFICATE_MODE, &certificate.pem())?;
        writeln!(report, "{}  {}", path.display(), peer.uri(DOMAIN))?;
    }
    Ok(report)
}

/// The domain in the names of processes. No process compares it.
const DOMAIN: &str = "tandem.internal";
/// How many days an authority is valid.
const AUTHORITY_DAYS: u32 = 3_650;

fn authority_params(cluster: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, format!("Tandem authority of {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid_for(params, AUTHORITY_DAYS)
}

fn params(peer: &Peer, days: u32) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, peer.to_string());
    params.subject_alt_names = vec![SanType::URI(peer.uri(DOMAIN).try_into()?)];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    valid_for(params, days)
}

/// Sets the days on which a certificate is valid: from yesterday on, because the clocks of hosts differ.
fn valid_for(mut params: CertificateParams, days: u32) -> Result<CertificateParams> {
    let today = Timestamp::now().to_zoned(TimeZone::UTC).date();
    let date = |date: Date| rcgen::date_time_ymd(date.year().into(), date.month().unsigned_abs(), date.day().unsigned_abs());
    params.not_before = date(today.yesterday()?);
    params.not_after = date(today.checked_add(i64::from(days).days())?);
    Ok(params)
}

fn write(path: &Path, mode: u32, text: &str) -> Result<()> {
    // The file is replaced as a whole, so that a process never reads a part of it.
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&new)?;
    file.write_all(text.as_bytes()).with_context(|| cannot("written", &new))?;
    fs::rename(&new, path).with_context(|| cannot("written", path))
}

fn cannot(done: &str, path: &Path) -> String {
    format!("{} cannot be {done}", path.display())
}
