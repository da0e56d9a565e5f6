-- A client key that was made to take the place of the one that is used, and waits for its certificate.
ALTER TABLE kmip_clients ADD COLUMN next_key_file TEXT;
