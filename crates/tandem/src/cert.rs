//! `tandem cert`: makes the certificates of a cluster's processes, and an authority that signs them.

use anyhow::{Context, Result, ensure};
use jiff::{Timestamp, ToSpan, civil::Date, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use ring::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, Permissions},
    io::Write,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
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
/// The folder cannot be written, another user may write it, or it has only a part of an authority.
pub fn run(args: &CertArgs) -> Result<String> {
    let CertArgs { folder, cluster, days } = args;
    // The path gets no slash at its end, so that a symbolic link is not followed.
    let folder: &Path = folder.components().as_path();
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder).with_context(|| cannot("created", folder))?;
    check_folder(folder)?;
    for role in PeerRole::ALL {
        let path = folder.join(format!("{}.pem", role.name()));
        let of = fs::read(&path).ok().and_then(|pem| Peer::of(&CertificateDer::from_pem_slice(&pem).ok()?));
        ensure!(
            of.as_ref().is_none_or(|of| of.cluster == *cluster),
            "{} is a certificate of another cluster, {}; choose another folder, or write --cluster {1}",
            path.display(),
            of.map_or_else(String::new, |of| of.cluster)
        );
    }
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
        let pem = fs::read_to_string(&ca_pem).with_context(|| cannot("read", &ca_pem))?;
        let print = fingerprint(&pem).with_context(|| cannot("used", &ca_pem))?;
        writeln!(report, "{}  the existing authority, with the SHA-256 {print}", ca_pem.display())?;
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
    // The file is replaced atomically, so no process reads half of it. A symbolic link in its place is replaced, not followed.
    let folder = path.parent().expect("the path is that of a file in a folder");
    let replace = || {
        let mut new = tempfile::Builder::new().permissions(Permissions::from_mode(mode)).tempfile_in(folder)?;
        new.write_all(text.as_bytes())?;
        new.as_file().sync_all()?;
        new.persist(path).map_err(|error| error.error)
    };
    replace().with_context(|| cannot("written", path))?;
    Ok(())
}

/// Refuses a folder in which another user could place an authority, or read or replace a key.
fn check_folder(folder: &Path) -> Result<()> {
    let found = fs::symlink_metadata(folder).with_context(|| cannot("read", folder))?;
    let ours = found.uid() == rustix::process::geteuid().as_raw();
    ensure!(
        found.is_dir() && ours && found.mode() & 0o022 == 0,
        "{} must be a folder, not a link, that belongs to you and that no other user can write; choose another folder, or run chmod go-w on it",
        folder.display()
    );
    Ok(())
}

/// Returns the SHA-256 of a certificate, as `openssl x509 -fingerprint -sha256` prints it.
fn fingerprint(pem: &str) -> Result<String> {
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes())?;
    let digest = digest(&SHA256, &certificate);
    Ok(digest.as_ref().iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(":"))
}

fn cannot(done: &str, path: &Path) -> String {
    format!("{} cannot be {done}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn cert(folder: &Path) -> Result<String> {
        run(&CertArgs { folder: folder.to_owned(), cluster: "tandem".to_owned(), days: 1 })
    }

    #[test]
    fn keys_are_private_and_replace_planted_links() {
        let place = tempfile::tempdir().expect("the system can create a temporary folder");
        let (folder, elsewhere) = (place.path().join("certs"), place.path().join("elsewhere"));
        fs::create_dir(&folder).expect("the name is free");
        fs::set_permissions(&folder, Permissions::from_mode(FOLDER_MODE)).expect("the folder is ours");
        fs::write(&elsewhere, "untouched").expect("the folder is writable");
        for link in ["ca.new", "router.new", "router.key", "router.pem"] {
            symlink(&elsewhere, folder.join(link)).expect("the name is free");
        }
        cert(&folder).expect("the folder is ours");
        assert_eq!(fs::read_to_string(&elsewhere).expect("the file exists"), "untouched");
        for key in ["ca.key", "router.key"] {
            let found = fs::symlink_metadata(folder.join(key)).expect("the key is written");
            assert!(found.is_file() && found.mode() & 0o777 == KEY_MODE, "{key}: {:o}", found.mode());
        }
    }

    #[test]
    fn folder_that_is_a_link_or_writable_by_others_is_refused() {
        let place = tempfile::tempdir().expect("the system can create a temporary folder");
        let (folder, link) = (place.path().join("certs"), place.path().join("link/"));
        cert(&folder).expect("the folder is new");
        symlink(&folder, place.path().join("link")).expect("the name is free");
        let refused = |folder: &Path| cert(folder).is_err_and(|error| error.to_string().contains("chmod go-w"));
        assert!(refused(&link), "a link");
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).expect("the folder is ours");
        assert!(refused(&folder), "a folder that the group can write");
    }

    #[test]
    fn output_names_an_existing_authority_by_its_fingerprint() {
        let place = tempfile::tempdir().expect("the system can create a temporary folder");
        let folder = place.path().join("certs");
        assert!(!cert(&folder).expect("the folder is new").contains("existing"));
        let again = cert(&folder).expect("the authority is there");
        let print = fingerprint(&fs::read_to_string(folder.join("ca.pem")).expect("the authority is there"))
            .expect("it is a certificate");
        assert_eq!(print.len(), 32 * 3 - 1);
        assert!(again.contains(&format!("the existing authority, with the SHA-256 {print}")), "{again}");
    }
}
