//! Certificates for tests of TLS.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A certificate authority and a certificate that it has signed, as PEM files.
pub struct Certificates {
    _folder: tempfile::TempDir,
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Certificates {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let file = |name: &str| folder.path().join(name);
        let (ca, certificate, key) = (file("ca.pem"), file("cert.pem"), file("key.pem"));
        let mut authority = rcgen::CertificateParams::new([]).expect("the certificate parameters are valid");
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        authority.distinguished_name.push(rcgen::DnType::CommonName, "authority of a test");
        let authority_key = rcgen::KeyPair::generate().expect("the system can generate a key");
        write(&ca, &authority.self_signed(&authority_key).expect("the certificate can be signed").pem());
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let own_key = rcgen::KeyPair::generate().expect("the system can generate a key");
        let own = rcgen::CertificateParams::new(["127.0.0.1".to_owned(), "localhost".to_owned()])
            .expect("the certificate parameters are valid");
        write(&certificate, &own.signed_by(&own_key, &issuer).expect("the certificate can be signed").pem());
        write(&key, &own_key.serialize_pem());
        Self { _folder: folder, ca, certificate, key }
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("the folder is writable");
}
